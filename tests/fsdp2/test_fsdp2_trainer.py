"""FSDP2 in the Trainer, wherever the model is defined, however often it is set up; two gloo ranks."""

import inspect
import io
import itertools
import logging
import tempfile
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor

from lightning_lowprec import parallelize
from tests.fsdp2.models import Net, batch, full, loss_of, same
from tests.fsdp2.ranks import run
from tests.toys import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 4
"""Of a run that says nothing else."""
STEPS_OF_A_MODEL = ("training_step", "validation_step", "test_step", "predict_step")


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return batch(index // 4, 9)[index % 4]


class Module(L.LightningModule):
    def __init__(self, early_optimizer=False):
        super().__init__()
        self.net = Net()
        self.losses, self.evaluated = [], []
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2) if early_optimizer else None

    def training_step(self, tokens, _):
        loss = loss_of(self.net, tokens)
        self.losses.append(loss.item())
        return {"loss": loss, "tokens": tokens}

    def validation_step(self, tokens, _):
        self.evaluated.append(loss_of(self.net, tokens).item())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return self.optimizer or torch.optim.AdamW(self.parameters(), lr=1e-2)


def trainer_for(precision, strategy="fsdp2", **kwargs):
    return L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, **{**QUIET, "max_epochs": 1, **kwargs}
    )


def loader(steps=8):
    return torch.utils.data.DataLoader(torch.utils.data.Subset(Tokens(), range(4 * steps)), batch_size=2)


class OwnSteps(Module):
    """Steps with fewer and with more arguments than usual; the Trainer reads their signatures."""

    def training_step(self, tokens):
        return super().training_step(tokens, 0)["loss"]

    def validation_step(self, tokens, batch_idx, dataloader_idx=0):
        self.log(f"loss {dataloader_idx} {batch_idx}", loss_of(self.net, tokens), add_dataloader_idx=False)

    test_step, predict_step = L.LightningModule.test_step, L.LightningModule.predict_step


class InConfigureModel(Module):
    def __init__(self):
        super().__init__()
        del self.net

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = Net()


class ByHand(Module):
    def configure_model(self):
        parallelize(self, self.device_mesh, self.trainer.precision_plugin)


def fitted(precision, model=None, strategy="fsdp2", **kwargs):
    model = Module() if model is None else model
    trainer = trainer_for(precision, strategy, **kwargs)
    trainer.fit(model, loader(STEPS), loader(STEPS))
    return model, trainer


def places(rank):
    models = {
        "__init__": (Module(), "fsdp2"),
        "configure_model": (InConfigureModel(), "fsdp2"),
        "optimizer in __init__": (Module(early_optimizer=True), "fsdp2"),
        "parallelize": (ByHand(), ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    }
    for model, strategy in models.values():
        fitted("fp8-hybrid", model, strategy, limit_val_batches=1)
    return {name: full(model.net) for name, (model, _) in models.items()}


def signatures(rank):
    model, trainer = OwnSteps(), trainer_for("bf16-mixed", max_steps=1, num_sanity_val_steps=0)
    trainer.fit(model, loader(1), [loader(1), loader(1)])
    return {
        "logged": sorted(name for name in trainer.callback_metrics if name.startswith("loss")),
        "parameters": [str(inspect.signature(getattr(model, f"{name}_step"))) for name in ("training", "validation")],
        "overridden": [name for name in STEPS_OF_A_MODEL if is_overridden(name, model)],
        "sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }


def again(rank):
    model = Module()
    trainer = trainer_for("bf16-remainder")
    trainer.validate(model, loader(), verbose=False)
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("lightning_lowprec").addHandler(handler)
    trainer.fit(model, loader())
    logging.getLogger("lightning_lowprec").removeHandler(handler)
    masters = "master_param" in trainer.optimizers[0].state_dict()["state"][0]
    steps = len(model.losses)
    trainer.test(model, loader(), verbose=False)
    other = trainer_for("bf16-remainder")
    other.test(model, loader(), verbose=False)
    other.fit(model, loader())
    try:
        trainer_for("fp8-hybrid").test(model, loader(), verbose=False)
    except TypeError as error:
        refused = str(error)
    return model.evaluated, steps, len(model.losses), refused, said.getvalue(), masters


class Untrained(Module):
    def configure_optimizers(self):
        return None


def without_optimizer(rank):
    saved = []
    for precision in ("bf16-mixed", "bf16-remainder"):
        _, trainer = fitted(precision, Untrained(), limit_val_batches=0)
        path = trainer.strategy.broadcast(f"{tempfile.mkdtemp()}/none.ckpt")
        trainer.save_checkpoint(path)
        model, other = Untrained(), trainer_for(precision, max_epochs=2, limit_val_batches=0)
        other.fit(model, loader(STEPS), ckpt_path=path)
        saved.append((trainer.current_epoch, len(model.losses), other.current_epoch))
    return saved


class Clipped(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def clipped(rank):
    moved = {}
    for precision, value in itertools.product(("32-true", "fp8-hybrid"), (0.1, None)):
        model = Clipped()
        before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
        trainer_for(precision, max_steps=1, gradient_clip_val=value).fit(model, loader())
        after = full(model.net)
        moved[precision, value] = sum((after[n] - before[n]).double().square().sum().item() for n in before) ** 0.5
    return moved


def worker(rank):
    warnings.simplefilter("ignore")
    parts = (places, signatures, again, clipped, without_optimizer)
    return {part.__name__: part(rank) for part in parts}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def test_the_model_may_be_defined_anywhere(results):
    weights = results[0]["places"]
    for name, other in weights.items():
        assert same(weights["__init__"], other), name


def test_the_trainer_sees_the_signatures_of_the_users_steps(results):
    """A step that is not the user's is left alone."""
    assert results[0]["signatures"] == {
        "logged": ["loss 0 0", "loss 1 0"],
        "parameters": ["(tokens)", "(tokens, batch_idx, dataloader_idx=0)"],
        "overridden": ["training_step", "validation_step"],
        "sharded": True,
    }


def test_a_sharded_model_goes_on_in_its_precision(results):
    evaluated, first, both, refused, said, masters = results[0]["again"]
    assert masters, "also after an evaluation"
    assert said.count("bf16-remainder: the model keeps its low-precision layers and weights after `fit`") == 1
    assert "because FSDP2 has sharded it" in said
    assert (first, both) == (8, 16)
    before, after, by_another = evaluated[:8], evaluated[8:16], evaluated[16:24]
    assert sum(after) < sum(before)
    assert by_another == after
    assert "sharded already" in refused


def test_a_model_without_an_optimizer_is_saved_and_resumed(results):
    assert results[0]["without_optimizer"] == [(1, STEPS, 2)] * 2


def test_the_trainer_clips_by_the_norm_of_all_shards(results):
    for found in results:
        for (precision, value), moved in found["clipped"].items():
            if value is None:
                assert moved > 0.15, "clipping must have something to clip"
            else:
                assert moved == pytest.approx(value, rel=1e-4), precision
