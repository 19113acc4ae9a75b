"""HalfMixed: its arguments, what "auto" takes, and that it computes in what it says."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import HalfMixed

BF16_ON_CPU = "half-auto: bf16 autocast, since cpu has bf16."


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("half-auto")]


@pytest.mark.parametrize(
    ("dtype", "scale", "said"),
    [
        ("bf16", 128.0, "`loss_scale=128.0` is not valid with bf16, .*; expected 'auto' or None, or use fp16"),
        ("fp16", None, "`loss_scale=None` is not valid with fp16, .*; expected 'auto', 'dynamic', a number"),
        ("auto", None, "`loss_scale=None` is not valid with fp16, .*; expected 'auto', 'dynamic', a number"),
        *(
            ("fp16", scale, "`loss_scale=.*; expected None, 'auto', 'dynamic', a number above 0 .* or a LossScale")
            for scale in ("static", 0, -2.0, float("nan"), True, {"initial": 8.0})
        ),
    ],
)
def test_what_is_not_valid(dtype: Any, scale: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        HalfMixed(dtype, loss_scale=scale)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast_on_cpu_computes_in_the_dtype(name: Any, dtype: torch.dtype) -> None:
    """1 + 2^-9 rounds to 1 in bf16 (8 bits) and not in fp16 (11 bits); 2^17 is finite in bf16 only."""
    plugin = HalfMixed(name)
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(nn.Linear(1, 1))
    with plugin.forward_context():
        fine = torch.tensor([[1 + 2.0**-9]]) @ torch.ones(1, 1)
        large = torch.tensor([[2.0**17]]) @ torch.ones(1, 1)
    assert fine.dtype == large.dtype == dtype
    assert fine.item() == (1.0 if name == "bf16" else 1 + 2.0**-9)
    assert large.isfinite().item() == (name == "bf16")


def test_auto_says_what_it_took_in_fabric(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[HalfMixed("auto", loss_scale=8.0)])
        assert messages(caplog) == []
        module = fabric.setup(nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()  # no loss scaling with bf16, whatever the scale would have been
    assert messages(caplog) == [BF16_ON_CPU]
    assert torch.equal(module.weight.grad, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("bf16-master", "weights in bf16, float32 masters in the optimizer"),
        ("fp16-master", "weights in fp16, float32 masters in the optimizer"),
        ("bf16-remainder", "weights in bf16, exact float32 masters in 2 more bytes per parameter"),
        ("bf16-8bit", "weights in bf16, exact float32 masters in 2 more bytes per parameter, moments of 8 bits"),
        ("bf16-sr", "weights in bf16, no masters, updates rounded stochastically"),
    ],
)
def test_one_line_says_what_is_kept(name: Any, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        L.Fabric(precision=name, accelerator="cpu").setup(nn.Linear(2, 2))
    assert [line for line in caplog.messages if line.startswith(name)] == [f"{name}: {kept}."]
