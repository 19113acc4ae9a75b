"""FSDP2 in the Trainer, wherever the model is defined, however often it is set up; two gloo ranks."""

import itertools
import logging
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lightning_lowprec import FSDP2Strategy, parallelize
from tests.fsdp2.models import Net, batch, full, loss_of, same
from tests.fsdp2.ranks import parts, quietly, run
from tests.toys import QUIET, Task, adamw

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return batch(index // 4, 9)[index % 4]


class Module(Task):
    def __init__(self, early_optimizer=False):
        super().__init__(Net(), loss_of, partial(adamw, lr=1e-2))
        self.evaluated = []
        self.early = adamw(self, 1e-2) if early_optimizer else None

    def training_step(self, tokens, _):
        return {"loss": super().training_step(tokens), "tokens": tokens}

    def validation_step(self, tokens, _):
        self.evaluated.append(loss_of(self.net, tokens).item())

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return self.early or super().configure_optimizers()


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
        self.evaluated.append((dataloader_idx, batch_idx))

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


def fitted(precision, model, strategy="fsdp2", validate=1, **kwargs):
    trainer = trainer_for(precision, strategy, **kwargs)
    trainer.fit(model, loader(STEPS), [loader(1)] * validate)
    return trainer


def the_model_may_be_defined_anywhere(rank):
    fitted("fp8-hybrid", first := Module())
    by_hand = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    for model, strategy in (
        (InConfigureModel(), "fsdp2"),
        (Module(early_optimizer=True), "fsdp2"),
        (OwnSteps(), "fsdp2"),
        (ByHand(), by_hand),
    ):
        fitted("fp8-hybrid", model, strategy, validate=2 if isinstance(model, OwnSteps) else 1)
        assert same(full(first.net), full(model.net)), type(model)
        if isinstance(model, OwnSteps):
            assert set(model.evaluated) == {(0, 0), (1, 0)}


def a_sharded_model_goes_on_in_its_precision(rank):
    said = []
    model = Module()
    trainer = trainer_for("bf16-remainder")
    trainer.validate(model, loader(), verbose=False)
    assert trainer.optimizers == [], "for an evaluation"
    logging.getLogger("lightning_lowprec").addFilter(lambda record: said.append(record.getMessage()) or True)
    trainer.fit(model, loader())
    if rank == 0:
        (line,) = [line for line in said if "the model keeps its low-precision layers and weights after `fit`" in line]
        assert "because FSDP2 has sharded it" in line
        assert sum("all-gather: " in line for line in said) == 1, "after the first of the steps"
    assert "master_param" in trainer.optimizers[0].state_dict()["state"][0], "also after an evaluation"
    assert len(model.losses) == 8
    trainer.test(model, loader(), verbose=False)
    other = trainer_for("bf16-remainder")
    other.test(model, loader(), verbose=False)
    before, after, by_another = model.evaluated[:8], model.evaluated[8:16], model.evaluated[16:24]
    assert sum(after) < sum(before)
    assert by_another == after
    other.fit(model, loader())
    assert len(model.losses) == 16
    with pytest.raises(TypeError, match="sharded already"):
        trainer_for("fp8-hybrid").test(model, loader(), verbose=False)


class Clipped(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)  # moves the weights by the gradient


CUT = {"net.blocks.0.up": ColwiseParallel(), "net.blocks.0.down": RowwiseParallel()}


def the_trainer_clips_by_the_norm_of_all_shards(rank):
    for precision, value, cut in itertools.product(("32-true", "fp8-hybrid-fp16"), (0.1, None), (False, True)):
        strategy = FSDP2Strategy(tensor_parallel=CUT, tensor_parallel_size=2) if cut else "fsdp2"
        model = Clipped()
        before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
        trainer_for(precision, strategy, max_steps=1, gradient_clip_val=value).fit(model, loader())
        after = full(model.net)
        moved = sum((after[n] - before[n]).double().square().sum().item() for n in before) ** 0.5
        if value is None:
            assert moved > 0.15, "clipping must have something to clip"
        else:
            assert moved == pytest.approx(value, rel=1e-4), precision


@parts(
    the_model_may_be_defined_anywhere,
    a_sharded_model_goes_on_in_its_precision,
    the_trainer_clips_by_the_norm_of_all_shards,
)
def test_two_ranks(part, tmp_path):
    run(quietly, 2, tmp_path, *part)
