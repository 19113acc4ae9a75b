"""A region in which the program has switched autocast off computes in its input's dtype, as torch's own layers do."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_lowprec
from tests.toys import ON_CPU, Task

NAMES = ["fp8-hybrid", "fp8-rowwise", "mxfp8", "int8-mixed", "msamp-o2", "msamp-o3"]


class Net(nn.Module):
    """A layer inside of a region without autocast, behind one that runs as the precision says."""

    def __init__(self, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.declared, self.checkpointed = nn.Linear(64, 64), nn.Linear(64, 64), checkpointed

    def region(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.declared(x)

    def forward(self, x):
        coded = self.first(x)
        return coded, checkpoint(self.region, x, use_reentrant=False) if self.checkpointed else self.region(x)


def set_up(name, net, **options):
    fabric = Fabric(accelerator="cpu", **(options or {"precision": name}))
    fabric.setup(net, torch.optim.AdamW(net.parameters()))
    return fabric._precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_output_and_gradients_are_those_of_torch(name, checkpointed, dtype):
    net = Net(checkpointed)
    plugin = set_up(name, net)
    x = torch.randn(32, 64).to(dtype).requires_grad_()
    weight = net.declared.weight.detach().clone().float().to(dtype).requires_grad_()
    bias = net.declared.bias.detach().clone().to(dtype).requires_grad_()
    y = F.linear(x, weight, bias)
    grads = torch.autograd.grad(y.float().square().sum(), (x, weight, bias))
    with plugin.forward_context():
        with plugin.forward_context():
            net.first(x)  # as another module's forward, inside of this one's
        coded, output = net(x)
        assert checkpointed or name != "fp8-hybrid" or torch.equal(torch.compile(net, backend="eager")(x)[1], output)
    output.float().square().sum().backward()
    assert output.dtype == dtype
    assert torch.equal(output, y)
    for got, expected in zip((x.grad, net.declared.weight.grad, net.declared.bias.grad), grads, strict=True):
        assert torch.equal(got.to(dtype), expected)
    assert not torch.equal(coded, F.linear(x.bfloat16(), net.first.weight.bfloat16(), net.first.bias.bfloat16()))


@pytest.mark.parametrize("name", ["bf16-8bit", "fp8-hybrid-8bit"])
def test_half_weights_are_refused_or_kept_float32(name):
    net = Net()
    x = torch.randn(32, 64)
    with set_up(name, net).forward_context():
        assert net(x.bfloat16())[1].dtype == torch.bfloat16
    said = rf"same dtype.*\. Under `precision='{name}'` weights are .*`keep_fp32="
    plugin = set_up(name, net)
    with pytest.raises(RuntimeError, match=said) as raised, plugin.forward_context(), plugin.forward_context():
        net(x)
    assert str(raised.value).count("Under `precision=") == 1
    net = Net()
    make = lightning_lowprec.HalfMixed if name == "bf16-8bit" else lightning_lowprec.FP8TorchAO
    options = ("bf16",) if name == "bf16-8bit" else ()
    plugin = set_up(name, net, plugins=make(*options, master_weights="8bit", keep_fp32=["declared"]))
    with plugin.forward_context():
        output = net(x)[1]
    assert torch.equal(output, F.linear(x, net.declared.weight, net.declared.bias))


@pytest.mark.parametrize("name", ["fp8-hybrid", "int8-mixed", "msamp-o2"])
def test_sparse_and_jagged_inputs_are_refused_by_name_of_the_way_out(name):
    net = Net()
    plugin = set_up(name, net)
    x = torch.randn(5, 64)
    jagged = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    with plugin.forward_context():
        for input, remedy in ((x.to_sparse(), r"`x.to_dense\(\)`"), (jagged, r"`x.values\(\)`")):
            with pytest.raises(TypeError, match=f"got an input of {input.layout}, .*{remedy}"):
                net.first(input)
        assert net.first(jagged.values()).shape == (5, 64)


@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_a_batch_is_cast_on_request_for_models_that_cannot_take_float32(strategy):
    def fit(**options):
        def loss(net, batch):
            seen.append(batch.dtype)
            return net.layer(batch.index_put((torch.tensor([0]),), net.token)).float().square().mean()

        seen, net = [], nn.Module()
        net.layer, net.token = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
        plugin = lightning_lowprec.HalfMixed("bf16", master_weights=True, **options)
        batches = DataLoader(torch.randn(8, 64), batch_size=4)
        L.Trainer(plugins=plugin, strategy=strategy, max_steps=2, **ON_CPU).fit(Task(net, loss), batches)
        return seen

    with pytest.raises(RuntimeError, match=r"keep_fp32=.* or have the whole batch cast: .*`.*cast_inputs=True`"):
        fit()
    assert fit(cast_inputs=True) == [torch.bfloat16] * 2
