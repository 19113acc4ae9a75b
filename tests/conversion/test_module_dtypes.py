"""On a CPU, norms and LSTMs with half-precision weights take float32 inputs as on CUDA, where autocast casts them.

Without it torch raises "mixed dtype (CPU)", and "could not create a primitive descriptor for the LSTM".
"""

import copy
import pickle
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from lightning_lowprec import plain

NAMES = ["bf16-remainder", "bf16-8bit", "fp16-master", "fp8-hybrid-remainder", "int8-mixed-remainder"]
NORMS = {  # with an epsilon that is none of torch's defaults
    "LayerNorm": nn.LayerNorm(16, 0.1),
    "LayerNorm without bias": nn.LayerNorm(16, 0.1, bias=False),
    "GroupNorm": nn.GroupNorm(4, 16, 0.1),
    "no weights": nn.LayerNorm(16, 0.1, elementwise_affine=False),
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
        assert torch.equal(out, norm(seen))
        fabric.backward(out.square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("packed", [False, True])
def test_lstms_run_in_half_precision(packed: bool) -> None:
    _, model, _ = set_up("bf16-remainder", nn.LSTM(16, 8, batch_first=True))
    lstm = model.module.part
    x, state = torch.randn(2, 5, 16), (torch.randn(1, 2, 8), torch.randn(1, 2, 8))
    given = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True) if packed else x
    half = given.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = lstm(hx=state, input=given)
        expected, _ = nn.LSTM.forward(lstm, half, tuple(s.bfloat16() for s in state))
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
    """On CUDA too, torch's instance norm refuses float32 inputs beside half-precision weights."""
    _, model, _ = set_up("bf16-remainder", nn.InstanceNorm1d(4, affine=True))
    norm, x = model.module.part, torch.randn(2, 4, 16).to(dtype)
    assert norm.weight.dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x), F.instance_norm(x, weight=norm.weight, bias=norm.bias))
