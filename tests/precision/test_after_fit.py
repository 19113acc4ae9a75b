"""A model is plain after fit, and as it was after a search of the Tuner; what goes on from there goes on as if not."""

from copy import deepcopy

import pytest
import torch
from lightning import Fabric, Trainer
from lightning.pytorch.callbacks import Callback, LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner

from lightning_lowprec import FP8TorchAO, fp8_state
from tests.precision.weights_left import WIDTH, Net, as_trained, exact_weights, fit, same_bits, seen
from tests.toys import ON_CPU

NAMES = ["half-auto", "fp16-master", "bf16-sr", "bf16-8bit", "fp8-rowwise-remainder", "int8-mixed", "msamp-o3"]
OTHERS = ["fp8-hybrid", "fp8-block", "bf16-master", "bf16-remainder", "fp8-hybrid-8bit", "fp8-hybrid-fp16", "mxfp8"]
OTHERS += ["msamp-o1", "msamp-o2"]
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings(r"ignore:Detected call of `lr_scheduler.step\(\)`"),  # fp16 skips the first steps
]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_a_call_after_fit_is_float32_with_the_masters_values(name):
    left, module = Net(frozen_head=True), Net(frozen_head=True)
    trainer, before = fit(as_trained(name), left), seen(module)
    trainer.test(left, verbose=False)  # which leaves the masters of the trainer's optimizers
    used = fit(name, module)
    optimizer = used.optimizers[0]
    fresh = Net()
    fresh.load_state_dict(exact_weights(left))
    batch = torch.randn(16, WIDTH)
    assert torch.equal(module(batch), fresh(batch))
    assert seen(module) == before
    assert type(optimizer) is torch.optim.AdamW
    trained = [p for p in module.parameters() if p.requires_grad]
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], trained, strict=True))
    evaluated, loaded = Net(frozen_head=True), {name: 1.1 * p for name, p in fresh.state_dict().items()}
    evaluated.on_test_start = lambda: evaluated.load_state_dict(loaded)
    used.test(evaluated, verbose=False)
    del evaluated.on_test_start
    assert seen(evaluated) == before
    assert same_bits(exact_weights(evaluated), loaded)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_that_is_saved_after_fit_resumes_bit_for_bit(name, tmp_path):
    whole, first, second = Net(), Net(), Net()
    fit(name, whole, max_epochs=3)
    fit(name, first, max_epochs=1).save_checkpoint(tmp_path / "after.ckpt")
    fit(name, second, max_epochs=3, ckpt_path=tmp_path / "after.ckpt")
    assert first.losses + second.losses == whole.losses
    assert same_bits(exact_weights(second), exact_weights(whole))


class OnTies(Callback):
    """Put masters half way between two bf16 values, where the forms of masters round in different directions."""

    def on_train_end(self, trainer, module):
        weight, masters = module.first.weight, trainer.precision_plugin.masters
        if masters is None:
            return
        value = (weight.data.float().view(torch.int32) | 0x8000).view(torch.float32)
        up = (value.view(torch.int32) + 0x8000).view(torch.float32).bfloat16()
        weight.data.copy_(up if masters.config.form == "remainder" else value)
        trainer.optimizers[0]._masters.refresh({id(weight): value})


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-rowwise-remainder", "fp8-e4m3-8bit", None, "msamp-o2", "msamp-o3"])
def test_export_rounds_the_plain_weights_as_the_run_has_rounded_its_own(name):
    left, module = Net(), Net()
    first, second = (name or FP8TorchAO(master_weights=True) for _ in range(2))
    trainer = fit(as_trained(first), left, callbacks=OnTies())
    fit(second, module, callbacks=OnTies())
    expected, found = (dict(fp8_state(model, dtype="bf16")) for model in (left, module))
    assert found["first.weight"].dtype is torch.float8_e4m3fn
    coded = [key for key in expected if key.startswith(("first.weight", "second.weight"))]
    assert same_bits({key: found[key].float() for key in coded}, {key: expected[key].float() for key in coded})
    for evaluated in ("half-auto", "32-true"):
        Trainer(precision=evaluated, **ON_CPU).test(module, verbose=False)
    assert same_bits(dict(fp8_state(module, dtype="bf16")), found)
    if name == "msamp-o2":
        Fabric(precision="32-true", accelerator="cpu").setup(module)
    else:
        fit("32-true" if name == "msamp-o3" else "half-auto", module)
    with pytest.raises(ValueError, match="no layer that runs in FP8"):
        fp8_state(module)
    assert trainer


MASTERS = ["bf16-master", "bf16-remainder", "bf16-8bit", "bf16-sr", "fp16-master"]
SEARCHED = ["half-auto", *MASTERS, "fp8-hybrid", "msamp-o2", "msamp-o3"]


@pytest.mark.parametrize(
    ("name", "search"), [*((name, "learning rate") for name in SEARCHED), ("msamp-o3", "batch size")]
)
def test_a_search_restores_the_model_and_the_training_after_it(name, search, tmp_path):
    alone = Net()
    fit(name, alone)
    module = Net()
    before, types = deepcopy(module.state_dict()), [type(m) for m in module.modules()]
    how = {"precision": name} if search == "learning rate" else {"plugins": as_trained(name)}
    trainer = Trainer(**how, **{**ON_CPU, "max_epochs": 1, "limit_val_batches": 0}, default_root_dir=tmp_path)
    if search == "learning rate":
        Tuner(trainer).lr_find(module, num_training=3, update_attr=False)
    else:
        Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)
        module.batch_size = 8
    assert same_bits(module.state_dict(), before)
    assert [p.dtype for p in module.parameters()] == [torch.float32] * 8
    if name not in ("half-auto", "fp8-hybrid"):
        assert [type(m) for m in module.modules()] == types
    module.losses.clear()
    trainer.fit(module)
    assert module.losses == alone.losses
    assert same_bits(exact_weights(module), exact_weights(alone))


def test_a_bf16_model_is_bf16_again_after_a_search(tmp_path):
    module = Net(torch.bfloat16)
    module.unused = torch.nn.BatchNorm1d(WIDTH, dtype=torch.bfloat16)  # whose buffers become float32 too
    before = deepcopy(module.state_dict())
    trainer = Trainer(precision="half-auto", **ON_CPU, max_epochs=1, limit_val_batches=0, default_root_dir=tmp_path)
    Tuner(trainer).lr_find(module, num_training=3, update_attr=False)
    assert same_bits(module.state_dict(), before)
    assert module.norm.weight.dtype is module.unused.running_var.dtype is torch.bfloat16
    trainer.callbacks.append(LearningRateFinder(num_training_steps=3, update_attr=False))
    trainer.fit(module)  # in which another search does not undo the training
    fit("half-auto", alone := Net(torch.bfloat16))
    assert torch.equal(module.first.weight, alone.first.weight)
    assert {p.dtype for p in trainer.precision_plugin.main_params(trainer.optimizers[0])} == {torch.float32}


@pytest.mark.parametrize("name", MASTERS)
def test_averages_of_half_weights_are_warned_of_at_set_up(name):
    averaging, strategy = StochasticWeightAveraging(1e-3, swa_epoch_start=1), "ddp" if "8bit" in name else "auto"
    match = rf"`StochasticWeightAveraging` averages.*'{name}'` keeps in half.*float32 weights.*main_params\("
    with pytest.warns(UserWarning, match=match):
        fit(name, module := Net(), callbacks=[averaging], max_epochs=3, strategy=strategy)
    assert all(p.isfinite().all() for p in module.parameters())
    fit("half-auto", Net(), callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)])
