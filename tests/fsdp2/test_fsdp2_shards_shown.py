"""What user code sees of weights and gradients inside ``training_step`` in manual optimization; one process."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_lowprec import FSDP2Strategy
from tests.fsdp2.test_fsdp2_review import fitted, flat, rows
from tests.representatives import names_on_cpu
from tests.toys import Block


class Steps(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = flat()
        self.blocks = nn.ModuleList([Block(64), Block(64)])
        self.automatic_optimization = False
        self.kinds = {}

    def forward(self, x, blocks=True):
        self.dtype_given = x.dtype
        for block in self.blocks if blocks else ():
            x = block(x)
        return self.net(x)

    def look(self, where):
        self.kinds[where] = {type(p).__name__ for p in self.parameters()}

    def training_step(self, batch):
        optimizer, shards = self.optimizers(), list(self.parameters())
        self.look("begin")
        loss = self(batch[0]).pow(2).mean()
        self.look("after forward")
        self.manual_backward(loss)
        self.look("after backward")
        first = self.net[0].weight.grad.full_tensor().clone()
        self(batch[0])  # no backward follows
        self.zero_grad(set_to_none=False)
        self.zeros = not any(shard.grad.full_tensor().any() for shard in shards)
        for to_none in (True, False):
            self.zero_grad(set_to_none=to_none)
        self.none = not any(shard.grad is not None for shard in shards)
        self.manual_backward(self(batch[0], blocks=False).pow(2).mean())
        self.changed = bool((self.net[0].weight.grad.full_tensor() != first).any())
        before = self.net[0].weight.full_tensor().clone()
        self(batch[0])
        optimizer.step()
        self.look("after step")
        self.moved = (self.net[0].weight.full_tensor() - before).norm().item()
        optimizer.zero_grad()
        whole = [p.full_tensor() for p in self.net.parameters()]
        out = self(batch[0], blocks=False)  # computed with the weights after the step
        hidden = nn.functional.gelu(nn.functional.linear(batch[0], *whole[:2]))
        self.off = (nn.functional.linear(hidden, *whole[2:]) - out).abs().max().item()

    def on_train_batch_end(self, *args):
        self.look("after training_step")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# by option: the root keeps what it has gathered, all is freed, nothing is
RESHARDED = {None: {"DTensor", "Parameter"}, True: {"DTensor"}, False: {"Parameter"}}


@pytest.mark.parametrize("reshard", RESHARDED)
def test_shards_are_shown_except_between_a_forward_and_its_backward(reshard):
    model = fitted(Steps(), FSDP2Strategy(reshard_after_forward=reshard), devices=1)
    assert model.kinds.pop("after forward") == RESHARDED[reshard]
    assert list(model.kinds) == ["begin", "after backward", "after step", "after training_step"]
    assert all(kinds == {"DTensor"} for kinds in model.kinds.values())
    assert (model.zeros, model.none, model.changed) == (True, True, True)
    assert model.moved > 1e-4
    assert model.off < 1e-6


class Fails(Steps):
    def forward(self, x):
        return super().forward(x), torch.arange(2)

    def training_step(self, batch):
        self.dtypes_inside = [output.dtype for output in self(batch[0])]
        raise KeyError("targets")


@pytest.mark.parametrize("automatic", [True, False])
def test_the_output_dtype_holds_inside_a_step_too_and_a_step_that_fails_has_ended(automatic):
    model = Fails()
    model.automatic_optimization = automatic
    with pytest.raises(KeyError, match="targets"):
        fitted(model, FSDP2Strategy(output_dtype=torch.float64), "bf16-mixed", devices=1)
    assert (model.dtype_given, model.dtypes_inside) == (torch.float32, [torch.float64, torch.int64])
    with torch.no_grad():
        model(rows())
    assert {type(p) for p in model.parameters()} == {DTensor}


class Penalised(Steps):
    """And gradients that a step of others leaves alone, as in a GAN."""

    def training_step(self, batch):
        self.unshard()
        self.zero_grad()
        penalty = sum(p.pow(2).sum() for p in self.net.parameters())
        self.manual_backward(self(batch[0]).mean() * 0 + penalty)
        self.off = [(p.grad - 2 * p).full_tensor().abs().max().item() for p in self.net.parameters()]
        self.unshard()
        self.manual_backward(self.net[0].weight.sum())
        self.optimizers().step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.blocks.parameters(), lr=0.1)


def test_penalties_on_weights_by_the_way_out_that_the_error_names():
    assert max(fitted(Penalised(), "fsdp2", devices=1).off) < 1e-6


class Recomputed(Steps):
    def training_step(self, batch):
        self.runs = []
        hook = self.blocks[0].up.register_forward_pre_hook(lambda *_: self.runs.append(torch.is_grad_enabled()))
        self.manual_backward(self(batch[0]).mean())
        with torch.no_grad():
            self(batch[0])
        hook.remove()


def test_activation_checkpointing_runs_a_block_again_in_the_backward_pass():
    strategy = FSDP2Strategy(activation_checkpointing=True)
    assert fitted(Recomputed(), strategy, devices=1).runs == [True, True, False]


class ByHand(Steps):
    def __init__(self, unshard=False, manual=True):
        super().__init__()
        self.unshard_first, self.manual = unshard, manual

    def training_step(self, batch):
        if self.unshard_first:
            self.unshard()
        loss = self.net(batch[0]).float().mean()
        backward = partial(self.manual_backward, loss) if self.manual else loss.backward
        self.optimizers().step(backward if self.manual else backward())
        pytest.fail("a step without the gradient")

    def configure_optimizers(self):
        return torch.optim.AdamW([{"params": part.parameters()} for part in (self.blocks, self.net)])


@pytest.mark.parametrize(
    "precision", [*({"mxfp8"} & {*names_on_cpu()}), "32-true", "fp8-hybrid", "bf16-8bit", "msamp-o3"]
)
def test_a_layer_called_by_hand_and_a_step_whose_gradients_are_in_no_shard_say_what_to_do(precision):
    said = r"in manual.*outside of the module's own forward: compute by `self\(\.\.\.\)`, call `self\.unshard\(\)`"
    with pytest.raises(RuntimeError, match=said):
        fitted(ByHand(), "fsdp2", precision, devices=1)
    for manual in (True, False):
        said = r"is not in the shard that the optimizer updates.*whole loss by `self\("
        with pytest.raises(RuntimeError, match=said):
            fitted(ByHand(unshard=True, manual=manual), "fsdp2", precision, devices=1)


class TwiceDifferentiated(Steps):
    def training_step(self, batch):
        x = batch[0].requires_grad_()
        torch.autograd.grad(self(x).float().sum(), x, create_graph=True)


def test_a_gradient_of_a_gradient_through_gathered_float8_weights_raises():
    with pytest.raises(RuntimeError, match=r"`create_graph=True`.*FP8Linear under FSDP2.*'ddp'"):
        fitted(TwiceDifferentiated(), "fsdp2", "fp8-hybrid", devices=1)
