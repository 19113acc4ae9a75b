"""Checkpoints of moments of 8 bits: what other precisions load of them."""

import pytest
import torch

from tests.precision.weights_left import Net, as_trained, fit

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def go_on(name, folder, epoch, make=Net):
    """Train an epoch of 3 steps, from the checkpoint of the epoch before; return losses and the state of a weight."""
    module = make()
    file = folder / f"{epoch - 1}.ckpt" if epoch > 1 else None
    trainer = fit(name if name == "32-true" else as_trained(name), module, max_epochs=epoch, ckpt_path=file)
    trainer.save_checkpoint(folder / f"{epoch}.ckpt")
    return module.losses, trainer.optimizers[0].state[module.first.weight]


@pytest.mark.parametrize("other", ["bf16-sr", "msamp-o2"])
def test_checkpoints_cross_to_other_precisions_and_back(other, tmp_path):
    go_on("bf16-8bit", tmp_path, 1)
    expected = [go_on("bf16-8bit", tmp_path, epoch)[0] for epoch in (2, 3)]
    losses, state = go_on(other, tmp_path, 2)
    assert int(state["step"]) == 6
    scales = {"exp_avg_scale", "exp_avg_sq_scale"} if other == "msamp-o2" else set()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", *scales}
    back, state = go_on("bf16-8bit", tmp_path, 3)
    assert int(state["step"]) == 9
    assert "exp_avg_codes" in state
    assert [losses, back] == [pytest.approx(each, rel=0.03) for each in expected]


@pytest.mark.parametrize(("make", "message"), [(Net, "exp_avg"), (Momentum, "size of tensor a .0. must match")])
def test_lightnings_own_precision_does_not_go_on_from_codes(make, message, tmp_path):
    go_on("bf16-8bit", tmp_path, 1, make)
    with pytest.raises((KeyError, RuntimeError), match=message):
        go_on("32-true", tmp_path, 2, make)
    _, state = go_on("half-auto", tmp_path, 2, make)  # decoded
    assert {value.dtype for value in state.values()} == {torch.float32}
    _, state = go_on("bf16-8bit", tmp_path, 2, make)
    assert all(value.numel() for value in state.values())
