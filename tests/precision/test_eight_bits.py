"""`bf16-8bit` in the Trainer: checkpoints that other precisions load."""

import pytest
import torch

from tests.contract.contract_models import Net, random_batches, trainer_with
from tests.precision.weights_left import as_trained

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]


class Momentum(Net):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


def fit(precision, steps, path=None, seed=0, make=Net):
    """Epochs of 3 steps; the end of an epoch is where Lightning resumes with the next batch."""
    torch.manual_seed(seed)
    model = make()
    trainer = trainer_with(
        precision if precision == "32-true" else as_trained(precision), max_steps=steps, max_epochs=-1
    )
    trainer.fit(model, random_batches(3), ckpt_path=path)
    return model, trainer


@pytest.mark.parametrize("other", ["bf16-sr", "msamp-o2"])
def test_checkpoints_cross_to_other_precisions_and_back(other, tmp_path):
    first, trainer = fit("bf16-8bit", 3)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    second, trainer = fit(other, 4, tmp_path / "first.ckpt", seed=1)
    state = trainer.optimizers[0].state[second.layers[0].weight]
    assert int(state["step"]) == 4
    scales = {"exp_avg_scale", "exp_avg_sq_scale"} if other == "msamp-o2" else set()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq", *scales}
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    back, trainer = fit("bf16-8bit", 5, tmp_path / "other.ckpt", seed=2)
    assert "exp_avg_codes" in trainer.optimizers[0].state[back.layers[0].weight]
    assert max(second.losses[0], back.losses[0]) < first.losses[0], "they go on, and do not begin anew"


@pytest.mark.parametrize(("model", "message"), [(Net, "exp_avg"), (Momentum, "size of tensor a .0. must match")])
def test_lightnings_own_precision_does_not_go_on_from_codes(model, message, tmp_path):
    path = tmp_path / "first.ckpt"
    fit("bf16-8bit", 3, make=model)[1].save_checkpoint(path)
    with pytest.raises((KeyError, RuntimeError), match=message):
        fit("32-true", 4, path, make=model)
    states = fit("half-auto", 4, path, make=model)[1].optimizers[0].state  # decoded
    assert {value.dtype for entry in states.values() for value in entry.values()} == {torch.float32}
    states = fit("bf16-8bit", 4, path, make=model)[1].optimizers[0].state
    assert all(value.numel() for entry in states.values() for value in entry.values())
