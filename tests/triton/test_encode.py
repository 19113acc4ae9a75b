"""The kernel that encodes weights writes the codes of torch's own casts, in both layouts, bit for bit."""

import lightning as L
import pytest
import torch

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.torchao import weight_codes
from tests.torchao.test_weight_codes import run, same

ENCODE = "lightning_lowprec.numerics.encode_kernel"


def codes_of(weight, scale):
    codes = weight_codes.WeightCodes(None, weight)
    codes.prepare(training=True)
    codes.scale.fill_(scale)
    return codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_kind_of_value(dtype):
    """Normal and subnormal codes, ties, zeros of both signs, infinities, NaN and values beyond the largest."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for rows, columns, scale in ((160, 272, 111.3), (16, 16, 1.0), (128, 256, 448.0)):
        weight = torch.randn(rows, columns, generator=generator)
        weight *= torch.exp2(torch.randint(-18, 9, weight.shape, generator=generator).float())
        odd = [
            0.0,
            -0.0,
            float("inf"),
            -float("inf"),
            float("nan"),
            448.0,
            464.0,
            1e4,
            2.0**-9,
            2.0**-10,
            1.0625,
            1.1875,
        ]
        weight.view(-1)[: len(odd)] = torch.tensor(odd)
        made.append((weight.to(dtype), codes_of(weight.to(dtype), scale)))
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    weight_codes.launch([weight for weight, _ in made], [codes for _, codes in made], kind)
    for weight, codes in made:
        expected = (weight.float() * codes.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        for layout, wanted in ((codes.rows, expected), (codes.columns, expected.t().contiguous())):
            numbers = layout.float()
            assert torch.equal(numbers.isnan(), wanted.float().isnan())
            assert torch.equal(layout.view(torch.uint8)[~numbers.isnan()], wanted.view(torch.uint8)[~numbers.isnan()])


def test_training_by_the_kernel_is_training_without(monkeypatch):
    launches, launch = [], weight_codes.launch
    monkeypatch.setattr(weight_codes, "DEVICES", {"cpu"})
    monkeypatch.setattr(weight_codes, "launch", lambda *args: (launches.append(len(args[0])), launch(*args)))
    keep = weight_codes.ModelCodes.__init__
    monkeypatch.setattr(weight_codes.ModelCodes, "__init__", lambda *args, **kw: keep(*args, **{**kw, "kernel": True}))
    ours = run("per_step")
    assert launches == [4, 4, 4]
    assert same(ours, run("per_gemm"))


def test_saved_codes_that_the_kernel_overwrites_are_autograds_error(monkeypatch):
    monkeypatch.setattr(weight_codes, "DEVICES", {"cpu"})
    plugin = FP8TorchAO()
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    net = torch.nn.Linear(64, 64)
    model = fabric.setup_module(net)
    net.weight_codes.model._kernel = True
    loss = model(torch.ones(16, 64, requires_grad=True)).sum()
    with torch.no_grad():
        net.weight.mul_(2)
    model(torch.ones(16, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fabric.backward(loss)
