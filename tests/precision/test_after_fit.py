"""A model that the Trainer hands back is plain, and everything that goes on from there goes on as if it were not."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_lowprec import fp8_state
from tests.precision.weights_left import WIDTH, Net, as_trained, exact_weights, fit, same_bits, seen

NAMES = ["half-auto", "fp16-master", "bf16-sr", "bf16-8bit", "fp8-rowwise-remainder", "int8-mixed", "msamp-o3"]
OTHERS = ["fp8-hybrid", "fp8-block", "bf16-master", "bf16-remainder", "fp8-hybrid-8bit", "fp8-hybrid-fp16", "mxfp8"]
OTHERS += ["msamp-o1", "msamp-o2"]
pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_a_call_after_fit_is_float32_with_the_masters_values(name):
    left, module = Net(frozen_head=True), Net(frozen_head=True)
    trainer, before = fit(as_trained(name), left), seen(module)
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
    assert trainer.optimizers, "which hold the masters"
    used.test(evaluated := Net(frozen_head=True), verbose=False)
    assert seen(evaluated) == before


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
        weight = module.first.weight
        value = (weight.data.float().view(torch.int32) | 0x8000).view(torch.float32)
        up = (value.view(torch.int32) + 0x8000).view(torch.float32).bfloat16()
        weight.data.copy_(up)
        trainer.optimizers[0]._masters.refresh({id(weight): value})


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-rowwise-remainder", "msamp-o2", "msamp-o3"])
def test_export_rounds_the_plain_weights_as_the_run_has_rounded_its_own(name):
    left, module = Net(), Net()
    ties = [OnTies()] if "remainder" in name else []
    trainer = fit(as_trained(name), left, callbacks=ties)
    fit(name, module, callbacks=ties)
    expected, found = (dict(fp8_state(model, dtype="bf16")) for model in (left, module))
    assert found["first.weight"].dtype is torch.float8_e4m3fn
    coded = [key for key in expected if key.startswith(("first.weight", "second.weight"))]
    assert same_bits({key: found[key].float() for key in coded}, {key: expected[key].float() for key in coded})
    fit("half-auto", module)
    with pytest.raises(ValueError, match="no layer that runs in FP8"):
        fp8_state(module)
    assert trainer


def test_what_a_callback_writes_during_an_evaluation_stays():
    class Writes(Callback):
        def on_validation_start(self, trainer, module):
            with torch.no_grad():
                module.first.weight[0] = 3.0

    module = Net()
    trainer = fit("bf16-master", module, limit_val_batches=1)
    trainer.callbacks.append(Writes())
    before = module.first.weight.detach().clone()
    trainer.validate(module, verbose=False)
    assert torch.equal(module.first.weight[1:], before[1:])
    assert (module.first.weight[0] == 3.0).all()
