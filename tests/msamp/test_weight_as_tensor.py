"""A weight of codes in the hands of code that does not know codes: reads, writes, views, copies, gradients."""

import copy
import weakref

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import MSAMP, plain
from lightning_lowprec.msamp import ScaledAdamW, scale_linears, set_values_, values_of
from tests.msamp.msamp_runs import every_level, linear
from tests.msamp.scaled_reference import quantise, value
from tests.quality import sqnr


def encoded(values):
    return value(quantise(values, torch.float16))


@every_level
def test_a_read_gives_the_values_in_the_dtype_of_computing(level):
    module, start = linear(level)
    weight, values = module.weight, encoded(start)
    assert (weight.dtype, weight.shape, weight.is_floating_point()) == (torch.float32, (48, 32), True)
    assert isinstance(weight, nn.Parameter)
    assert torch.equal(weight.detach().clone(), values)
    assert torch.equal(weight.to(torch.bfloat16), values.to(torch.bfloat16))
    assert torch.equal(weight[3:5, ::2].t() + 0, values[3:5, ::2].t())
    assert torch.equal(torch.cat([weight, weight]), torch.cat([values, values]))
    assert weight.norm() == values.norm()
    assert weight.tolist() == values.tolist()
    assert torch.equal(weight.detach().view(torch.int32), values.view(torch.int32))
    assert all((shown == values.numpy()).all() for shown in (weight.detach().cpu().numpy(), weight.numpy(force=True)))
    assert type(torch.zeros_like(weight)) is torch.Tensor
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(4, 32)
        assert torch.equal(F.linear(x, weight), F.linear(x, values))
    with pytest.raises(RuntimeError, match=r"Use weight.detach\(\).numpy\(\)"):  # as for every tensor
        weight.numpy()


@every_level
def test_inference_mode_reads_views_and_writes(level):
    module = nn.Linear(32, 48)
    values = encoded(module.weight.detach())
    with torch.inference_mode():
        scale_linears(module, [""], level)
        weight = module.weight
        assert torch.equal(weight.t() + 0, values.t())
        assert torch.equal(weight.data[2] + 0, values[2])
        assert torch.equal(weight.t().to(torch.bfloat16), values.t().to(torch.bfloat16))
        assert torch.equal(weight.flatten() + 0, values.flatten())
        x = torch.randn(4, 48)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(F.linear(x, weight.t()), F.linear(x, values.t()))
        weight[2] = 1.0
    assert bool((values_of(module.weight)[2] == 1.0).all())
    module(torch.randn(16, 32)).sum().backward()
    optimizer = ScaledAdamW(module.parameters(), level=level)
    optimizer.step()  # codes of inference mode could not be stepped
    plain(module)
    assert {value.dtype for value in optimizer.state[module.weight].values()} == {torch.float32}, "it is plain, too"


def test_micro_batches_with_and_without_reads_add_up():
    module, start = linear("O2")
    x = torch.randn(16, 32)
    module(x).sum().backward()
    layer = module.weight.grad + 0
    assert torch.equal(module.weight.grad.mul(module.weight), layer * encoded(start))
    penalty = 2 * encoded(start)
    module.weight.grad = None
    module.weight.pow(2).sum().backward()
    module(x).sum().backward()
    assert torch.equal(module.weight.grad, penalty + layer)
    module.weight.grad = None
    (module.weight.pow(2).sum() + module(x).sum()).backward()
    assert torch.equal(module.weight.grad, penalty + layer)


@every_level
@pytest.mark.parametrize("steps", [True, False])
def test_a_change_between_forward_and_backward_is_noticed_also_where_the_data_are_replaced_then(level, steps):
    module, start = linear(level)
    x = torch.randn(16, 32, requires_grad=True)
    module(x).sum().backward()
    loss, codes = module(x).sum(), module.weight.msamp_state.for_products()[0]
    version = codes._version
    if steps:
        ScaledAdamW(module.parameters(), level=level).step()
    else:
        with torch.no_grad():
            module.weight.copy_(-start)
        module.weight.data = 2 * start
    assert codes._version > version, "inductor hides what it writes, the scale too"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_read_is_that_of_eager_code():
    module, start = linear("O3")
    weight = encoded(start).requires_grad_()
    x = torch.randn(16, 32)

    def loss(w):
        return F.linear(F.linear(x, w), w.t()).square().mean() + w.pow(2).sum()

    compiled = torch.compile(lambda m: loss(m.weight), backend="aot_eager", fullgraph=True)
    compiled(module).backward()
    loss(weight).backward()
    assert torch.allclose(module.weight.grad, weight.grad, rtol=1e-5, atol=1e-7)


def row_(weight):
    weight[3] = 0.25


def chunks_(weight):
    for i, part in enumerate(weight.chunk(3)):
        part.add_(i + 1.0)


def of_another_(weight):
    other = linear("O2")[0].weight
    weight.copy_(other.mul_(-32.0))
    weight[:2].copy_(other[2:4].mul_(32.0))  # of another scale


WRITES = {
    "another": of_another_,
    "row": row_,
    "columns": lambda weight: weight.data[:, 4:6][1:].fill_(-3.0),
    "transposed": lambda weight: weight.t()[1:3].copy_(torch.ones(2, 48)),
    "chunks": chunks_,
    "out": lambda weight: torch.mul(torch.ones(48, 32), 3.0, out=weight),
}


@every_level
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_encodes_the_values_anew(level, write):
    module, start = linear(level)
    plain, weight = nn.Parameter(encoded(start)), module.weight
    with torch.no_grad():
        write(weight)
        write(plain)
    rounded = encoded(plain.detach())
    if write is chunks_:  # three writes, each of which rounds
        assert bool(((values_of(weight) - rounded).abs() <= rounded.abs() * 2.0**-10).all())
    else:
        assert torch.equal(values_of(weight), rounded)
    before = values_of(weight)
    assert not copy.deepcopy(weight.detach()[:2]).zero_().any()
    assert torch.equal(values_of(weight), before), "a copy of a part is a tensor by itself"
    assert module.weight is weight
    x = torch.randn(16, 32)
    other, _ = linear(level)
    parameter = other.weight
    for assign in (False, True):
        other.load_state_dict(module.state_dict(), assign=assign)
        assert other.weight is parameter
        assert torch.equal(module(x), other(x))  # the layer multiplies what was written
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        other.load_state_dict({**module.state_dict(), "weight": torch.zeros(3, 3)})


@every_level
def test_a_write_that_would_be_rounded_away_raises_and_changes_nothing(level):
    module, _ = linear(level)
    before = values_of(module.weight)
    ema = torch.optim.swa_utils.AveragedModel(module, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9999))
    ema.update_parameters(module)
    for write in (lambda w: w.mul_(1 - 1e-6), lambda w: w.data.add_(1e-9), lambda w: w.copy_(w.clone() + 1e-9)):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"would be lost: \d+ of .*average.*keep=\[") as error:
            write(module.weight)
        assert "set_values_" in str(error.value)
    module(torch.randn(16, 32)).sum().backward()
    ScaledAdamW(module.parameters(), level=level, lr=1e-3).step()
    with pytest.raises(RuntimeError, match="would be lost"):
        ema.update_parameters(module)
    assert torch.equal(values_of(ema.module.weight), before)
    before[0, :3] *= torch.tensor([2.0, 1 + 2.0**-13, 1.0])
    with torch.no_grad():
        ema.module.weight.copy_(before)  # half of what changes is lost
        before[0, :3] *= torch.tensor([2.0, 1.0, 1 + 2.0**-13])
        with pytest.raises(RuntimeError, match="lost: 2 of the 3 values"):
            ema.module.weight.copy_(before)
    set_values_(module.weight, before + 1e-9)  # somebody who wants rounding


def test_a_weight_takes_no_other_shape_and_no_collective():
    module, _ = linear("O2")
    for data in (torch.zeros(3, 3), torch.zeros(48, 32, device="meta")):
        with pytest.raises(RuntimeError, match=rf"got data of shape .* on {data.device};.*keep=\[\.\.\.\]"):
            module.weight.data = data
    with pytest.raises(TypeError, match=r"_foreach_mul_.*average their state dicts.*keep=\[\.\.\.\]"), torch.no_grad():
        torch._foreach_mul_([module.weight], 2.0)


@every_level
def test_data_that_were_put_aside_come_back_and_two_weights_exchange_theirs(level):
    """``backup = p.data; p.data = average; ...; p.data = backup``, as averages do that people copy from each other."""
    module, _ = linear(level)
    other, _ = linear("O3" if level == "O2" else level)
    with torch.no_grad():
        other.weight.mul_(-1.7)
    first, second = module.state_dict()["weight"], other.state_dict()["weight"]
    average, x = torch.linspace(-4, 4, first.numel()).view_as(first), torch.randn(16, 32)
    output = module(x)
    backup = module.weight.data
    with torch.inference_mode():  # as in Lightning's validation
        module.weight.data = average
    assert torch.equal(values_of(module.weight), encoded(average))
    assert not torch.equal(module(x), output)
    module(x).sum().backward()
    ScaledAdamW(module.parameters(), level=level).step()
    module.weight.data = backup
    assert torch.equal(module.state_dict()["weight"], first)
    module.weight.data, other.weight.data = other.weight.data, module.weight.data
    assert torch.equal(module.state_dict()["weight"], second)
    assert torch.equal(other.state_dict()["weight"], first)
    assert (module.weight.e4m3 is None) == (level != "O3"), "weights of two levels exchange values"
    module.weight.data = module.weight.data[:].t().contiguous().t()  # a view, and another layout: the values count
    assert torch.equal(values_of(module.weight), encoded(second))
    other.weight.data = module.weight.data[:]
    with torch.no_grad():
        torch._foreach_copy_([module.weight, other.weight], [-first, -second])
    assert all(map(torch.equal, map(values_of, (module.weight, other.weight)), (-first, -second)))


@every_level
def test_conversion_keeps_hooks_attributes_and_references_of_the_parameter(level):
    module = nn.Linear(32, 48)
    seen, start = [], module.weight.detach().clone()
    reference, view, loss = weakref.ref(module.weight), module.weight.t(), module(torch.randn(4, 32)).sum()
    module.weight._no_weight_decay = True
    module.weight.register_hook(lambda grad: seen.append(grad.shape))
    handle = module.weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad)))
    scale_linears(module, [""], level)
    assert module.weight._no_weight_decay
    module(torch.randn(16, 32)).sum().backward()
    assert seen == [(48, 32), type(module.weight.grad)]
    handle.remove()
    module(torch.randn(16, 32)).sum().backward()
    assert seen[2:] == [(48, 32)]
    assert reference() is module.weight
    assert torch.equal(view, start.t())
    with pytest.raises(RuntimeError, match="computed before a parameter was converted"):
        loss.backward()


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_torchs_encoder_layer_evaluates_in_one_call(level):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    x = torch.randn(2, 8, 32)
    expected = layer(x).detach()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level))
    converted = fabric.setup_module(layer).eval()
    with torch.no_grad(), fabric.autocast():
        output = converted(x.bfloat16())
    assert sqnr(expected, output.float()) >= {"O2": 44.7, "O3": 38.8}[level]
