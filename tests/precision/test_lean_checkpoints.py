"""Checkpoints of lean precisions: exact resumes, other precisions before and after, and a kill in an update."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_lowprec.masters.optimizer import main_params
from tests.forked import python
from tests.masters.master_loops import equal
from tests.precision.lean_models import LEAN_NAMES, Net, fit, plugin

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]


@pytest.mark.parametrize(
    ("name", "clip"),
    [*((name, None) for name in LEAN_NAMES), ("bf16-lean", 0.02), ("remainder8", None), ("moments", None)],
)
def test_a_checkpoint_resumes_bit_for_bit_and_is_plain(name, clip, tmp_path):
    def precision():
        return {"remainder8": plugin("remainder8"), "moments": plugin(update="moments")}.get(name, name)

    options = {"gradient_clip_val": clip, "accumulate_grad_batches": 3 if name == "moments" else 1}
    whole, again = Net(), Net()
    whole_trainer = fit(whole, precision(), steps=6, **options)
    half = Net()
    fit(half, precision(), steps=3, **options).save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert {t.dtype for t in saved["state_dict"].values()} == {torch.bfloat16}
    trainer = fit(again, precision(), steps=6, ckpt_path=tmp_path / "half.ckpt", **options)
    assert equal(again.state_dict(), whole.state_dict())
    assert equal(trainer.optimizers[0].state_dict(), whole_trainer.optimizers[0].state_dict())


OTHERS = ["bf16-remainder", "bf16-master", "bf16-sr", "fp8-hybrid", "half-auto", "bf16-lean-sr", "msamp-o2"]


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoints_cross_between_lean_and_other_precisions(other, tmp_path):
    first = Net()
    trainer = fit(first, "bf16-lean", steps=3)
    trainer.save_checkpoint(tmp_path / "lean.ckpt")
    second = Net(1)
    trainer = fit(second, other, steps=4, ckpt_path=tmp_path / "lean.ckpt")
    state = trainer.optimizers[0].state[second.layers[0].weight]
    assert int(state["step"]) == 4
    scales = {"exp_avg_scale", "exp_avg_sq_scale"} if other == "msamp-o2" else set()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", *scales} or other == "bf16-lean-sr"
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    back = Net(2)
    trainer = fit(back, "bf16-lean", steps=5, ckpt_path=tmp_path / "other.ckpt")
    assert "exp_avg_codes" in trainer.optimizers[0].state[back.layers[0].weight]
    assert len({tuple(loss.item() for loss in losses) for losses in (first.losses, second.losses, back.losses)}) == 3
    assert max(second.losses[0], back.losses[0]) < first.losses[0], "they go on, and do not begin anew"


def test_the_masters_are_exact_in_other_precisions(tmp_path):
    trainer = fit(Net(), "bf16-lean", steps=3)
    exact = [value.detach().clone() for value in main_params(trainer.optimizers[0])]
    trainer.save_checkpoint(tmp_path / "lean.ckpt")

    class Looks(Callback):
        def on_train_start(self, trainer, model):
            self.found = [value.detach().clone() for value in main_params(trainer.optimizers[0])]

    for other in ("bf16-remainder", "bf16-master"):
        looks = Looks()
        fit(Net(1), other, steps=4, ckpt_path=tmp_path / "lean.ckpt", callbacks=[looks])
        assert equal(looks.found, exact)


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


@pytest.mark.parametrize(("model", "message"), [(Net, "exp_avg"), (Momentum, "size of tensor a .0. must match")])
def test_lightnings_own_precision_does_not_go_on_from_codes(model, message, tmp_path):
    fit(model(), "bf16-lean", steps=3).save_checkpoint(tmp_path / "lean.ckpt")
    with pytest.raises((KeyError, RuntimeError), match=message):
        fit(model(), "32-true", steps=4, ckpt_path=tmp_path / "lean.ckpt")
    trainer = fit(model(), "half-auto", steps=4, ckpt_path=tmp_path / "lean.ckpt")  # decoded
    assert all(
        value.dtype == torch.float32 for entry in trainer.optimizers[0].state.values() for value in entry.values()
    )
    trainer = fit(model(), "bf16-lean", steps=4, ckpt_path=tmp_path / "lean.ckpt")
    assert all(value.numel() for entry in trainer.optimizers[0].state.values() for value in entry.values())


KILLED = """
import os
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tests.precision.lean_models import Net, fit

class Dies(Net):
    def training_step(self, batch, batch_idx=0):
        if self.trainer.global_step == 3:
            self.layers[0].weight.register_hook(lambda grad: os._exit(7))  # the last Linear is updated, the first not
        return super().training_step(batch)

saves = ModelCheckpoint({folder!r}, every_n_train_steps=3, save_last=True)
fit(Dies(), "bf16-lean", steps=6, callbacks=[saves], enable_checkpointing=True)
"""


def test_a_kill_in_the_middle_of_an_update_leaves_the_last_checkpoint_whole(tmp_path):
    root = str(Path(__file__).parents[2])
    script = KILLED.format(folder=str(tmp_path))
    done = python("-c", script, cwd=tmp_path, environ={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 7, done.stderr
    whole, again = Net(), Net()
    fit(whole, "bf16-lean", steps=6)
    fit(again, "bf16-lean", steps=6, ckpt_path=tmp_path / "last.ckpt")
    assert equal(again.state_dict(), whole.state_dict())
    assert len(again.losses) == 3
