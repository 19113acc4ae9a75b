"""HalfEval: training is that of 32-true, evaluation that of bf16 autocast, bit for bit."""

import lightning as L
import pytest
import torch

from lightning_lowprec import FabricFSDP2Strategy, HalfEval
from tests.precision.weights_left import WIDTH, Net, exact_weights, fit, same_bits


def test_in_the_trainer():
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


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_in_fabric(name, dtype):
    fabric = L.Fabric(accelerator="cpu", plugins=HalfEval(name))
    model, same, x = Net(), Net(), torch.randn(3, WIDTH)
    wrapped, _ = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.setup_module(same).eval()  # as a teacher beside the model that trains
    assert torch.equal(wrapped(x), same(x))
    wrapped.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = same(x.to(dtype))
    output = wrapped(x)
    assert torch.equal(output, expected.float())
    assert not torch.equal(output, same(x))
    wrapped.train()
    fabric.backward(wrapped(x).sum())
    assert model.first.weight.grad.dtype is torch.float32


def test_refusals():
    with pytest.raises(ValueError, match="`dtype='bf16-true'` is not valid; expected one of: bf16, fp16"):
        HalfEval("bf16-true")
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricFSDP2Strategy(), plugins=HalfEval())
    with pytest.raises(ValueError, match=r"does not run under FSDP2, which gathers weights in one dtype\. Use '32-tr"):
        fabric.launch()
