"""FlashOptim's optimizers keep masters themselves: they get none of ours, and one log line says so.

FlashOptim has no kernels for a CPU. Its classes are known by the name of their base, which is all that these tests
need; ``tests/ledger/test_flash_optim.py`` trains with the package itself where it is installed.
"""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.names import validate_name


class FlashOptimizer(torch.optim.SGD):
    """Has the name of the base of FlashOptim's optimizers."""


class FlashAdamW(FlashOptimizer):
    """Has a name of FlashOptim."""


@pytest.mark.parametrize("name", ["bf16-remainder", "bf16-8bit", "bf16-sr", "fp8-hybrid-remainder"])
def test_it_steps_the_half_weights_without_masters_of_ours(name, caplog):
    torch.manual_seed(0)
    fabric = L.Fabric(accelerator="cpu", devices=1, precision=name)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with caplog.at_level("INFO"):
        module, optimizer = fabric.setup(model, FlashAdamW(model.parameters(), lr=1.0))
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            fabric.backward(module(torch.randn(8, 64)).square().mean())
            grads = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            expected = [w - g for w, g in zip(before, grads, strict=True)]
            assert all(map(torch.equal, [p.detach() for p in model.parameters()], expected))
            before = [p.detach().clone() for p in model.parameters()]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert registry_of(optimizer.optimizer) is None
    assert type(optimizer.optimizer) is FlashAdamW
    assert caplog.text.count("FlashAdamW of FlashOptim keeps masters and moments itself") == 1


def test_another_optimizer_gets_masters():
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-remainder")
    model = nn.Linear(64, 64)
    _, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert registry_of(optimizer.optimizer) is not None


@pytest.mark.parametrize(("word", "answer"), [("bf16-flash", "bf16-8bit"), ("fp16-flash", "fp16-master")])
def test_words_of_others_are_answered(word, answer):
    with pytest.raises(ValueError, match=f"Write '{answer}'"):
        validate_name(word)
