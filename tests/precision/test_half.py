"""HalfMixed computes in what it says; HalfEval trains as 32-true and evaluates as bf16 autocast, bit for bit."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FabricFSDP2Strategy, HalfEval, HalfMixed
from tests.precision.weights_left import WIDTH, Net, exact_weights, fit, same_bits


def test_auto_says_what_it_took_in_fabric(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[HalfMixed("auto", loss_scale=8.0)])
        assert "half-auto" not in caplog.text
        module = fabric.setup(nn.Linear(2, 2))
        module(torch.ones(1, 2)).sum().backward()  # no loss scaling with bf16, whatever the scale would have been
    said = [(r.name, r.levelname, r.filename, r.getMessage()) for r in caplog.records if "auto" in r.getMessage()]
    assert said == [("lightning_lowprec", "INFO", "half.py", "half-auto: bf16 autocast, since cpu has bf16.")]
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


def test_half_eval_in_the_trainer():
    mine, same = Net(), Net()
    trainer = fit(HalfEval(), mine, limit_val_batches=None)
    assert trainer.precision_plugin.peak_rate_dtype is torch.float32  # steps are float32
    fit("32-true", same, limit_val_batches=None)
    assert mine.losses == same.losses
    assert same_bits(exact_weights(mine), exact_weights(same))
    outputs = []
    mine.register_forward_hook(lambda module, args, output: outputs.append(output))
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        evaluate(mine, same.train_dataloader())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = [same(batch) for batch in same.train_dataloader()] * 3
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    assert all(map(torch.equal, outputs, expected))
    assert len(outputs) == len(expected)
    inputs = []
    mine.register_forward_pre_hook(lambda module, args: inputs.append(args[0].dtype))
    L.Fabric(accelerator="cpu", devices=1, precision="half-auto").setup(mine)(torch.ones(2, WIDTH))
    assert inputs == [torch.bfloat16], "Fabric casts inputs, also of a module that a Trainer has had before"


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_eval_in_fabric(name, dtype):
    fabric = L.Fabric(accelerator="cpu", plugins=HalfEval(name))
    model, same, x = Net(), Net(), torch.randn(3, WIDTH)
    fabric.setup_module(same).eval()  # as a teacher beside the model that trains
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(wrapped(x), same(x))
    wrapped.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = same(x.to(dtype))
    assert torch.equal(output := wrapped(x), expected.float())
    assert not torch.equal(output, same(x))
    wrapped.train()
    fabric.backward(wrapped(x).sum())
    assert model.first.weight.grad.dtype is torch.float32


def test_half_eval_under_fsdp2_is_refused():
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(), plugins=HalfEval())
    with pytest.raises(ValueError, match=r"does not run under FSDP2, which gathers weights in one dtype\. Use '32-tr"):
        fabric.launch()


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(16, 16, device="meta")], ids=["no parameters", "meta"])
def test_a_plugin_by_hand_takes_lightnings_device_where_parameters_have_none(model):
    plugin = HalfMixed("bf16")
    plugin.convert_module(model)
    with plugin.forward_context():
        assert torch.is_autocast_enabled("cpu")
