"""Checkpoints of a training by Transformer Engine's layers, in the Trainer: into any precision, and from any."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lowprec import FP8TE, FP8TorchAO, HalfMixed
from tests.te import reference
from tests.te.subjects import QUIET, Lit

PRECISIONS = {
    "current": lambda: FP8TE(reference.current_scaling(), norms=False),
    "current-fp16": lambda: FP8TE(reference.current_scaling(), norms=False, base="fp16"),
    "nvfp4": lambda: FP8TE(reference.nvfp4(), norms=False),
    "32-true": lambda: "32-true",
    "torchao": FP8TorchAO,
    "fp16": lambda: HalfMixed("fp16"),
}
OURS = ("current", "current-fp16", "nvfp4")


class Learns(Lit):
    def train_dataloader(self):
        return DataLoader(torch.randn(8, 16, 32, generator=torch.Generator().manual_seed(0)), batch_size=1)


def fit(name, epochs, checkpoint=None, **options):
    model, chosen = Learns(), PRECISIONS[name]()
    precision = {"precision": chosen} if isinstance(chosen, str) else {"plugins": chosen}
    quiet = QUIET | {"max_epochs": epochs, "enable_checkpointing": False}
    trainer = L.Trainer(**precision, **quiet, **options)
    trainer.fit(model, ckpt_path=checkpoint, weights_only=True)
    return trainer, model


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_resumes_bit_for_bit(reference_te, name, accumulate, tmp_path):
    """With kept weights too: a resumed run quantises more often, and to the same codes."""
    _, whole = fit(name, 2, accumulate_grad_batches=accumulate)
    trainer, first = fit(name, 1, accumulate_grad_batches=accumulate)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    _, second = fit(name, 2, tmp_path / "some.ckpt", accumulate_grad_batches=accumulate)
    assert [*first.losses, *second.losses] == whole.losses
    assert all(torch.equal(p, q) for p, q in zip(second.parameters(), whole.parameters(), strict=True))


PAIRS = [(a, b) for a in PRECISIONS for b in PRECISIONS if a != b and (a in OURS or b in OURS)]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a} into {b}" for a, b in PAIRS])
def test_goes_on_in_another_precision(reference_te, source, target, tmp_path):
    """The weights are those that were saved: the first loss is that of an evaluation of them, to rounding."""
    trainer, first = fit(source, 1)
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    state = torch.load(tmp_path / "some.ckpt", weights_only=True)["state_dict"]
    plain = Learns()
    plain.load_state_dict(state, strict=True)
    batch = next(iter(plain.train_dataloader()))
    expected = plain.net(batch).square().mean().item()
    _, second = fit(target, 2, tmp_path / "some.ckpt")
    assert len(second.losses) == 8
    assert second.losses[0] == pytest.approx(expected, rel=0.03 if "nvfp4" not in target else 0.15)
    assert second.losses[0] < first.losses[0]
