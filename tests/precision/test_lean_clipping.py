"""Clipping under the lean names, which update weights before the norm of all gradients is known."""

import logging

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_lowprec import HalfMixed
from lightning_lowprec.masters.optimizer import add_masters, main_params, move_grads_to_masters
from lightning_lowprec.masters.weights import cast_parameters
from tests.masters.master_loops import equal
from tests.precision.lean_models import Net, batches, codes, fit, plugin


@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.02), ("value", 1e-3)])
def test_8_bits_in_the_step_accumulate_and_clip_as_a_plain_loop(algorithm, limit):
    model, plain = Net(), Net()
    clip = {"gradient_clip_val": limit, "gradient_clip_algorithm": algorithm}
    trainer = fit(model, "bf16-8bit", steps=9, accumulate_grad_batches=3, **clip)
    assert trainer.global_step == 3
    originals = cast_parameters(plain, torch.bfloat16, keep=True)
    optimizer = add_masters(plain.configure_optimizers(), "8bit", values=originals)
    clipped = {"norm": torch.nn.utils.clip_grad_norm_, "value": torch.nn.utils.clip_grad_value_}[algorithm]
    for _ in range(3):
        for batch in batches(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain.training_step(batch.bfloat16()) / 3
            loss.backward()
        move_grads_to_masters(optimizer)
        largest = max(p.grad.abs().max() for p in main_params(optimizer))
        clipped(main_params(optimizer), limit)
        assert 0 < max(p.grad.abs().max() for p in main_params(optimizer)) < largest
        optimizer.step()
        optimizer.zero_grad()
    assert "exp_avg_codes" in optimizer.state[plain.layers[0].weight]
    assert equal(model.state_dict(), plain.state_dict())
    assert equal(trainer.optimizers[0].state_dict()["state"], optimizer.state_dict()["state"])


def test_the_trainer_clips_each_gradient_as_the_message_says():
    with pytest.raises(MisconfigurationException) as refused:
        fit(Net(), "bf16-lean", gradient_clip_val=1.0, gradient_clip_algorithm="value")
    config = codes("master_weights=", refused.value)[-1]
    assert fit(Net(), HalfMixed("bf16", master_weights=config)).global_step == 3


def test_clipping_by_norm_takes_the_norm_so_far_or_that_of_the_last_step(caplog):
    """A loop by hand in float64 clips the same gradients, in the order in which the backward makes them."""
    model = Net()
    copies = {p: p.detach().clone() for p in model.parameters()}
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[plugin("fp32", "fp32")])
    module, optimizer = fabric.setup(model, model.configure_optimizers())
    reference, seen, last, limit = torch.optim.AdamW(copies.values(), lr=3e-3), [], 0.0, 0.02
    for p in model.parameters():
        p.register_hook(lambda grad, p=p: seen.append((p, grad.double())))
    factors = []
    for number, (batch, weight) in enumerate(zip(batches(5), (1, 1, 8, 1, 1), strict=True)):
        seen.clear()
        fabric.backward(F.mse_loss(module(batch).float(), batch.flip(-1)) * weight)
        with caplog.at_level(logging.INFO):
            norm = fabric.clip_gradients(module, optimizer, max_norm=limit)
        optimizer.step()
        optimizer.zero_grad()
        so_far = 0.0
        for p, grad in seen:
            so_far = (so_far**2 + float(grad.square().sum())) ** 0.5
            factors.append(min(1.0, limit / max(so_far, last)) if number else 1.0)
            copies[p].grad = (grad * factors[-1]).float()
        reference.step()
        if number:
            assert float(norm) == pytest.approx(so_far, rel=1e-5)
            last = so_far
    assert min(factors) < 0.1
    for master, copy in zip(main_params(optimizer), copies.values(), strict=True):
        torch.testing.assert_close(master, copy, rtol=0, atol=1e-6)
    assert caplog.text.count("Gradients are clipped by the norm of the last step") == 1


def test_clipping_by_hand_in_the_trainer_is_refused():
    class Clips(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx=0):
            self.manual_backward(super().training_step(batch))
            self.clip_gradients(self.optimizers(), 1.0, "value")

    with pytest.raises(RuntimeError, match=r"gradients were to be clipped.*clip_tensor=1.0"):
        fit(Clips(), "bf16-lean")


@pytest.mark.parametrize("hook", ["configure_gradient_clipping", "on_before_optimizer_step"])
def test_hooks_that_run_when_gradients_are_gone_are_warned_of(hook):
    class Hooked(Net):
        seen = False

    def reads(self, *args, **options):
        Hooked.seen = all(p.grad is None for p in self.parameters())

    setattr(Hooked, hook, reads)
    with pytest.warns(UserWarning, match=r"`p.grad` is None, and .* clips nothing.*`precision='bf16-8bit'`"):
        fit(Hooked(), "bf16-lean")
    assert Hooked.seen, "the warning says the truth"
