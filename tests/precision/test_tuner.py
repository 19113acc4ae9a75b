"""A search of the Tuner leaves the model bit for bit as it was, and the training after it as without the search."""

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner

from tests.precision.weights_left import Net, exact_weights, fit, same_bits
from tests.toys import ON_CPU

MASTERS = ["bf16-master", "bf16-remainder", "bf16-8bit", "bf16-sr", "fp16-master"]
NAMES = ["half-auto", *MASTERS, "fp8-hybrid", "msamp-o2", "msamp-o3"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)`"),  # fp16 skips the first steps
]


def state(module):
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("name", "search"), [*((name, "learning rate") for name in NAMES), ("msamp-o3", "batch size")])
def test_a_search_restores_the_model_and_the_training_after_it(name, search, tmp_path):
    alone = Net()
    fit(name, alone)
    module = Net()
    before, types = state(module), [type(m) for m in module.modules()]
    trainer = Trainer(precision=name, **{**ON_CPU, "max_epochs": 1, "limit_val_batches": 0}, default_root_dir=tmp_path)
    if search == "learning rate":
        Tuner(trainer).lr_find(module, num_training=3, update_attr=False)
    else:
        Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)
        module.batch_size = 8
    assert same_bits(state(module), before)
    assert [p.dtype for p in module.parameters()] == [torch.float32] * 8
    if name not in ("half-auto", "fp8-hybrid"):
        assert [type(m) for m in module.modules()] == types
    module.losses.clear()
    trainer.fit(module)
    assert module.losses == alone.losses
    assert same_bits(exact_weights(module), exact_weights(alone))


def test_a_bf16_model_is_bf16_again_after_a_search(tmp_path):
    module = Net(torch.bfloat16)
    before = state(module)
    trainer = Trainer(precision="half-auto", **ON_CPU, max_epochs=1, limit_val_batches=0, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(module, num_training=3, update_attr=False)
    assert same_bits(state(module), before)
    assert module.norm.weight.dtype is torch.bfloat16
    trainer.fit(module)
    assert {p.dtype for p in trainer.precision_plugin.main_params(trainer.optimizers[0])} == {torch.float32}


@pytest.mark.parametrize("name", MASTERS)
def test_averages_of_half_weights_are_warned_of_at_set_up(name):
    averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
    match = rf"`StochasticWeightAveraging` averages.*'{name}'` keeps in half.*float32 weights.*main_params\("
    with pytest.warns(UserWarning, match=match):
        fit(name, module := Net(), callbacks=[averaging], max_epochs=3)
    assert all(p.isfinite().all() for p in module.parameters())
    fit("half-auto", Net(), callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)])
