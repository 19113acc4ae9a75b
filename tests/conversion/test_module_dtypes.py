"""Norms and LSTMs with half-precision weights on a CPU, and stacked experts with a replaced forward, run as on CUDA."""

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lightning_lowprec import FP8TorchAO, HalfMixed, plain, plan
from tests.conversion.test_plan import changed
from tests.torchao import test_experts

NAMES = ["bf16-remainder", "bf16-8bit", "fp16-master", "fp8-hybrid-remainder", "int8-mixed-remainder"]
NORMS = {  # with an epsilon that is none of torch's defaults
    "LayerNorm": nn.LayerNorm(16, 0.1),
    "LayerNorm without bias": nn.LayerNorm(16, 0.1, bias=False),
    "GroupNorm": nn.GroupNorm(4, 16, 0.1),
    "no weights": nn.LayerNorm(16, 0.1, elementwise_affine=False),
    "a forward of the user": changed(nn.LayerNorm(16), forward=torch.abs),
}


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(16, 16), copy.deepcopy(part)

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        seen = self.linear(x).float()
        return seen, self.part(seen)


def set_up(name: str, part: nn.Module) -> tuple[L.Fabric, Any, Any]:
    torch.manual_seed(1)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)  # type: ignore[arg-type]
    model = Model(part)
    for parameter in model.part.parameters():
        nn.init.normal_(parameter)
    return fabric, *fabric.setup(model, torch.optim.AdamW(model.parameters(), 0.1))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_norms_run_in_float32(name: str, kind: str) -> None:
    fabric, model, optimizer = set_up(name, NORMS[kind])
    norm = copy.deepcopy(NORMS[kind])  # torch's own, in float32
    x = torch.randn(4, 16)
    for _ in range(2):
        seen, out = model(x)
        assert out.dtype is torch.float32
        norm.load_state_dict(model.module.part.state_dict())
        with fabric.autocast():
            assert torch.equal(model.module.part(input=seen), out)
        assert torch.equal(out, norm(seen))
        fabric.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("packed", "with_state"), [(False, True), (True, True), (True, False)])
def test_lstms_run_in_half_precision(packed: bool, with_state: bool) -> None:
    _, model, _ = set_up("bf16-remainder", nn.LSTM(16, 8, batch_first=True))
    lstm = model.module.part
    x, state = torch.randn(2, 5, 16), (torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    given = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True) if packed else x
    half = given.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = lstm(given, *[state] * with_state) if packed else lstm(hx=state, input=given)
        expected, _ = nn.LSTM.forward(lstm, half, tuple(s.bfloat16() for s in state) if with_state else None)
    values = [(part.data if isinstance(part, PackedSequence) else part) for part in (out, expected)]
    assert values[0].dtype is torch.bfloat16
    assert torch.equal(*values)


def test_it_ends_with_the_precision_and_survives_copies() -> None:
    _, model, _ = set_up("bf16-remainder", nn.LayerNorm(16))
    copied, exact = pickle.loads(pickle.dumps(model.module)), copy.deepcopy(model.module)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 16)
        assert torch.equal(copied(x)[1], model.module(x)[1])
        assert torch.allclose(exact(x)[1], model.module(x)[1], rtol=2.0**-7, atol=2.0**-7)  # its weights are float32
    assert "forward" not in vars(plain(model).part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_instance_norms_keep_float32_weights(dtype: torch.dtype) -> None:
    _, model, _ = set_up("bf16-remainder", nn.InstanceNorm1d(4, affine=True))
    norm, x = model.module.part, torch.randn(2, 4, 16).to(dtype)
    assert norm.weight.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), F.instance_norm(x, weight=norm.weight, bias=norm.bias))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of float32 and bf16 in an RMSNorm
@pytest.mark.parametrize("norm", [*list(NORMS.values())[:4], nn.RMSNorm(16)], ids=str)
def test_a_norm_that_returns_float32_as_on_cuda_returns_half_precision_where_input_and_weight_are(norm: Any) -> None:
    norm, x = copy.deepcopy(norm), torch.randn(4, 16)
    norm.register_forward_hook(lambda norm, args, output: output.float())
    norm = set_up("fp8-hybrid-remainder", norm)[1].module.part
    with torch.autocast("cpu", torch.bfloat16):
        by_name = norm(**{"x" if isinstance(norm, nn.RMSNorm) else "input": x.bfloat16()})
        outputs = [norm(x.bfloat16()), norm(x), by_name, norm.float()(x.bfloat16())]
    half = torch.float32 if norm.weight is None else torch.bfloat16
    assert [output.dtype for output in outputs] == [half, *[torch.float32] * 3]


class Layer(torch.nn.Module):
    """Experts beside a Linear, which converts whatever happens to the experts."""

    def __init__(self):
        super().__init__()
        self.experts, self.linear = test_experts.Layer("mixtral").experts, torch.nn.Linear(64, 64)

    def forward(self, x):
        index = torch.arange(len(x)).unsqueeze(1) % torch.tensor([2, 4])
        return self.experts(self.linear(x).float(), index, torch.full(index.shape, 0.5))


def replace_forward(experts):
    old = experts.forward
    experts.forward = lambda *args: 2.0 * old(*args)


def test_autocast_reaches_experts_below_a_replaced_forward(monkeypatch):
    model, x = Layer(), torch.randn(24, 64)
    replace_forward(model.experts)
    expected, config = model(x), model.experts.config
    wrapped = L.Fabric(plugins=HalfMixed("bf16"), accelerator="cpu").setup(model)
    seen, multiply = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, **kw: (seen.append(b.dtype), multiply(a, b, **kw))[1])
    torch.testing.assert_close(wrapped(x).float(), expected, rtol=0.05, atol=0.05)
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert config._experts_implementation == "grouped_mm", "other models may share the config"
    assert model.experts.config.hidden_size == 64
    for copied in (copy.deepcopy(model.experts.config), pickle.loads(pickle.dumps(model.experts.config))):
        assert copied._experts_implementation == "lightning_lowprec"
        assert copied.own_config._experts_implementation == "grouped_mm"
        assert copied.own_config is not config
    plain(model)
    config._experts_implementation = "eager"  # a loop of operations that autocast knows
    L.Fabric(plugins=HalfMixed("bf16"), accelerator="cpu").setup(model)(x)
    with pytest.raises(TypeError, match="NoneType"):
        model.experts(x, None, None)
    assert model.experts.config is not config, "after an error of the model's own code too"
    plain(model)
    config._experts_implementation = "grouped_mm"
    assert model.experts.config is config
    assert torch.equal(model(x), expected)
    assert seen[2:] == [torch.float32, torch.float32]
    config._experts_implementation = "lightning_lowprec"
    with pytest.raises(ValueError, match=r"experts_implementation='lightning_lowprec'` is not valid.*'grouped_mm'"):
        model(x)


def test_fp8_keeps_experts_whose_forward_was_replaced():
    model = Layer()
    replace_forward(model.experts)
    reasons = {row.fqn: row.kept_because for row in plan(model, "fp8-rowwise").rows}
    replaced = "its forward is replaced on the instance"
    assert reasons == {"linear": None, "experts.gate_up_proj": replaced, "experts.down_proj": replaced}
    fabric = L.Fabric(plugins=FP8TorchAO(recipe="rowwise"), accelerator="cpu")
    assert fabric.setup(model)(torch.randn(24, 64)).isfinite().all()
