"""A model under FSDP2 that reads the weight of a converted layer, against the same model in float32."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import lightning_lowprec  # noqa: F401  (registers the names)
from tests.fsdp2.toy import fabric_for
from tests.quality import sqnr
from tests.toys import Stack

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 64)

    def forward(self, x):
        assert (2 * self.up.weight).dtype is self.up.weight.dtype
        return x + F.linear(self.down(self.up(x)), self.up.weight.view(32, 64) + self.up.weight.t())


Model = partial(Stack, Block, seed=0)


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-e4m3", "fp8-block", "msamp-o3"])
def test_a_read_of_a_gathered_weight_gives_values_and_gradients(alone, name):
    model = Model()
    plain = copy.deepcopy(model)
    expected = plain(X)
    expected.square().sum().backward()
    sharded = (fabric := fabric_for(name, strategy="fsdp2")).setup_module(model)
    with torch.inference_mode():  # before training, as Lightning does under nccl
        assert sqnr(expected.detach(), sharded.eval()(X).float()) > 25
    output = sharded.train()(X)
    assert sqnr(expected.detach(), output.detach().float()) > 25
    fabric.backward(output.float().square().sum())
    for (fqn, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert sqnr(p.grad, q.grad.full_tensor().float()) > 20, fqn


def test_a_write_to_a_gathered_weight_raises(alone):
    writes = torch.Tensor.mul_, lambda weight, factor: torch._foreach_mul_([weight], factor)
    for name, write in product(("fp8-hybrid", "fp8-block", "msamp-o3"), writes):
        model = Model()
        hook = model.blocks[0].down.register_forward_pre_hook(lambda layer, _, write=write: write(layer.weight.data, 2))
        model.blocks[1].up.weight.requires_grad_(False)
        model.of_the_root = nn.Parameter(torch.ones(4))
        sharded = fabric_for(name, strategy="fsdp2").setup_module(model)
        assert not model.blocks[1].up.weight.requires_grad
        with pytest.raises(RuntimeError, match=r"would write to a gathered weight of shape \(64, 64\).*to the shards"):
            sharded(X)
        hook.remove()
        with torch.no_grad():
            sharded(X)
        assert {type(p) for p in model.parameters()} == {DTensor}, "also after a forward that has failed"


class Reader(Block):
    def forward(self, x):
        return x + F.linear(F.linear(x, self.up.weight, self.up.bias), self.down.weight)[:, :32]


@pytest.mark.filterwarnings("ignore:.*returned a view tensor")
@pytest.mark.parametrize("name", ["fp8-hybrid", "msamp-o3"])
def test_a_layer_that_is_only_read_is_named_and_the_gather_too(alone, name):
    model = nn.Sequential(Reader(), nn.Linear(32, 32))
    sharded = (fabric := fabric_for(name, strategy="fsdp2")).setup_module(model)
    with pytest.warns(UserWarning, match=r"'0.up', '0.down'.*FSDP2 gathers the weights like those of the other"):
        fabric.backward(sharded(X).float().square().sum())
    assert fabric.strategy.precision.plan.converted == ("1",)
