"""`trace_nonfinite=True` names the first module whose output, or whose gradient, is not finite."""

import warnings

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor
from tests.callbacks.test_monitor_runs import Net, fit


class Spoiled(nn.Module):
    """Overflows in one direction, at the third step."""

    def __init__(self, direction):
        super().__init__()
        self.direction, self.steps = direction, 0

    def forward(self, x):
        self.steps += self.training
        if self.steps == 3 and self.direction == "forward":
            return x * torch.inf
        if self.steps == 3:
            x = x.clone()
            x.register_hook(lambda gradient: gradient * torch.nan)
        return x


class Chain(Net):
    def __init__(self, direction):
        super().__init__()
        self.blocks.insert(1, Spoiled(direction))


@pytest.mark.parametrize(
    ("direction", "forward", "backward"),
    [
        ("forward", (2, "blocks.1"), (2, "head")),  # the gradient of a loss of infinite values, at its first layer
        ("backward", (3, "blocks.0.up"), (2, "blocks.1")),  # its step makes the weights NaN
    ],
)
def test_the_first_module_is_named(direction, forward, backward, tmp_path):
    monitor = NumericsMonitor(every=100, trace_nonfinite=True)
    with pytest.warns(UserWarning, match="is the first that is not finite") as seen:
        fit(tmp_path, monitor, net=Chain(direction), logger=False)
    found = {name: (one.step, one.fqn) for name, one in monitor.nonfinite.items()}
    assert found.get("forward") == forward
    assert found["backward"] == backward
    texts = [str(w.message) for w in seen if "not finite" in str(w.message)]
    assert any(text.startswith(f"step 2: the gradient of the output of {backward[1]!r}") for text in texts)
    assert len(texts) == len(found)


def test_weights_that_are_not_finite_are_named_and_a_finite_run_is_silent():
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO())
    net = Net()
    model = fabric.setup(net)
    model.mark_forward_method("training_step")
    monitor = NumericsMonitor(trace_nonfinite=True)
    for step in range(3):
        monitor.step(model, step)
        if step == 2:
            with torch.no_grad():
                net.blocks[1].up.bias[3] = torch.nan
        fabric.backward(model.training_step(torch.randn(16, 64), 0))
        if step < 2:
            with warnings.catch_warnings(action="error"):
                monitor.finish()
            assert monitor.nonfinite == {}
    with pytest.warns(UserWarning, match="is the first that is not finite") as seen:
        monitor.finish()
    forward, _ = (str(warning.message) for warning in seen)
    expected = "the output of 'blocks.1.up' is the first that is not finite; its bias is not finite either."
    assert forward == f"step 2: {expected}"
    assert not any(module._forward_hooks for module in net.modules())
