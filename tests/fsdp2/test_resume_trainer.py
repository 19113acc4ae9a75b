"""The Trainer: two ranks resume; ModelCheckpoint's folders; checkpoints of one device and of DDP."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_lowprec import FSDP2Strategy
from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_fabric import float32_of
from tests.fsdp2.toy import QUIET, Toy, X, Y, adamw, assert_same, everything

CASES = (
    ("32-true", "sharded"), ("16-mixed", "full"), ("fp8-hybrid", "sharded"), ("fp8-hybrid-fp16", "full"),
    ("bf16-remainder", "full"), ("bf16-sr", "sharded"),
)  # fmt: skip
PLUGIN = {"bf16-master": "HalfMixed", "bf16-remainder": "HalfMixed", "fp8-hybrid-fp16": "FP8TorchAO"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


def factored(model):
    """An optimizer that keeps a vector of the rows, and one of the columns."""
    optimizer = adamw(model)

    @optimizer.register_step_post_hook
    @torch.no_grad()
    def step(*_):
        for p in optimizer.param_groups[1]["params"]:  # the matrices
            state = optimizer.state[p]
            for name, dim in (("rows", 1), ("columns", 0)):
                state.setdefault(name, p.new_zeros(p.shape[1 - dim])).add_(p.grad.square().mean(dim))
            p.sub_(1e-3 * p.grad / (state["rows"].unsqueeze(1) * state["columns"]).sqrt())

    return optimizer


class Look(L.Callback):
    def on_train_start(self, trainer, module):
        self.restored = everything(module, trainer.optimizers[0], trainer.precision_plugin)
        self.rate = float(trainer.optimizers[0].param_groups[0]["lr"])


def fit(precision, ranks, epochs, strategy="fsdp2", seed=0, path=None, folder=None, make=adamw, **kwargs):
    if strategy in ("sharded", "full"):
        strategy = FSDP2Strategy(state_dict_type=strategy)
    look = Look()
    callbacks = [look, *kwargs.pop("callbacks", [])]
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, precision=precision, max_epochs=epochs,
        callbacks=callbacks, enable_checkpointing=len(callbacks) > 1, default_root_dir=folder, **QUIET, **kwargs,
    )  # fmt: skip
    model = Toy(seed, make=make)
    dataset = torch.utils.data.TensorDataset(X[:32], Y[:32])  # four steps of eight rows an epoch
    loader = torch.utils.data.DataLoader(dataset, batch_size=8 // ranks if ranks < 8 else 1)
    trainer.fit(model, loader, ckpt_path=path)
    return trainer, model, look


def saves_and_goes_on(rank, ranks, folder):
    for precision, kind in CASES:
        path = folder / f"{precision}.{kind}.ckpt"
        make = factored if precision in ("32-true", "16-mixed") else adamw
        _, whole, _ = fit(precision, ranks, 2, kind, make=make)
        trainer, begun, _ = fit(precision, ranks, 1, kind, make=make)
        trainer.save_checkpoint(path)
        saved = everything(begun, trainer.optimizers[0], trainer.precision_plugin)
        resumed_trainer, resumed, look = fit(precision, ranks, 2, kind, seed=9, path=path, make=make)
        assert_same(look.restored, saved, path.name)
        assert begun.losses + resumed.losses == whole.losses, path.name
        assert look.rate == pytest.approx(0.9e-2)
        assert resumed_trainer.current_epoch == 2
    keeps_two_folders(rank, ranks, folder)
    resumes_from_elsewhere(rank, ranks, folder)


def keeps_two_folders(rank, ranks, folder):
    for kind in ("sharded", "full"):
        place = folder / f"callback.{kind}"
        callback = ModelCheckpoint(place, save_last=True, save_top_k=1, monitor="epoch", mode="max")
        trainer, _, _ = fit("bf16-mixed", ranks, 3, kind, callbacks=[callback])
        trainer.strategy.barrier()
        assert sorted(f.name for f in place.iterdir()) == ["epoch=2-step=12.ckpt", "last.ckpt"]
        _, resumed, _ = fit("bf16-mixed", ranks, 4, kind, path=place / "last.ckpt")
        assert len(resumed.losses) == 4
        trainer.save_checkpoint(place / "weights", weights_only=True)
        with pytest.raises(KeyError, match=r"weights' holds the model alone .*was asked to resume"):
            fit("bf16-mixed", ranks, 4, kind, path=place / "weights")


def resumes_from_elsewhere(rank, ranks, folder):
    for precision in PLUGIN:
        for source in ("auto", "ddp"):
            path = folder / f"{precision}.{source}.ckpt"
            if source == "ddp":
                trainer, _, _ = fit(precision, ranks, 1, "ddp")
                trainer.save_checkpoint(path)
                trainer.strategy.barrier()
            plain = torch.load(path, weights_only=True)
            stored = {"model": plain["state_dict"], "optimizer": plain["optimizer_states"][0]}
            _, _, look = fit(precision, ranks, 2, "sharded", seed=4, path=path)
            for value, expected in zip(float32_of(look.restored), float32_of(stored), strict=True):
                assert torch.equal(value, expected), path.name
            for i, entry in look.restored["optimizer"]["state"].items():
                assert torch.equal(entry["exp_avg_sq"], stored["optimizer"]["state"][i]["exp_avg_sq"].float())
            assert look.restored["precision"] == plain.get(PLUGIN[precision], {}), path.name


def from_one_device(rank, ranks, folder):
    for precision in PLUGIN:
        trainer, _, _ = fit(precision, 1, 1, "auto")
        trainer.save_checkpoint(folder / f"{precision}.auto.ckpt")


def test_two_ranks_resume(tmp_path):
    launch(from_one_device, 1, tmp_path, tmp_path)
    launch(saves_and_goes_on, 2, tmp_path, tmp_path)
