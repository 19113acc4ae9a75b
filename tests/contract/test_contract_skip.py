"""`skip_nonfinite=True`: a run with a NaN batch is, bit for bit, the run that never saw this batch."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from contract_models import (
    OVERFLOW,
    Batches,
    Net,
    Probe,
    X,
    assert_same_tensors,
    fabric_probe,
    fabric_with,
    msamp_state_of,
    net,
    random_batches,
    same,
    trainer_with,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from plugins_under_test import fp8_te
from torch import Tensor
from torchao.optim import CPUOffloadOptimizer

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, MasterConfig
from tests.precision.weights_left import as_trained

NAN = torch.full((8, 32), float("nan"))
PLUGINS: dict[str, Callable[..., Any]] = {
    "bf16": partial(HalfMixed, "bf16"),
    "half-auto": partial(HalfMixed),
    "bf16-master": partial(HalfMixed, "bf16", master_weights=True),
    "bf16-8bit-fp32-gradients": partial(
        HalfMixed, "bf16", master_weights="8bit", grad_accumulation_dtype=torch.float32
    ),
    "bf16-sr-8bit-moments": partial(HalfMixed, "bf16", master_weights=MasterConfig(form="stochastic", moments="8bit")),
    "tensorwise": partial(FP8TorchAO),
    "rowwise": partial(FP8TorchAO, "rowwise"),
    "tensorwise-sr": partial(FP8TorchAO, master_weights="stochastic"),
    "msamp-o1": partial(MSAMP, "O1"),
    "msamp-o2": partial(MSAMP, "O2", grad_accumulation_dtype=torch.float32),
    "msamp-o3": partial(MSAMP, "O3"),
}
if find_spec("transformer_engine"):
    PLUGINS |= {"FP8TE": partial(fp8_te), "FP8TE-fp8-params": partial(fp8_te, fp8_params=True)}
every_skipping = pytest.mark.parametrize("name", PLUGINS)


def make(name: str) -> Any:
    return PLUGINS[name](skip_nonfinite=True)


def held(module: torch.nn.Module, optimizer: Any) -> list[Any]:
    """Everything that a step may change: weights, codes and scales, optimizer state."""
    codes = [vars(state) for p in module.parameters() if (state := msamp_state_of(p)) is not None]
    tensors = [{k: v for k, v in entry.items() if isinstance(v, Tensor)} for entry in codes]
    plain = [p.detach() for p in module.parameters() if msamp_state_of(p) is None]
    return [plain, tensors, list(optimizer.state_dict()["state"].values())]


def by_trainer(plugin: Any, batches: list[Tensor], accumulate: int, clip: float | None) -> tuple[Any, Any]:
    module = net()
    trainer = trainer_with(as_trained(plugin), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    trainer.fit(module, Batches(*batches))
    assert trainer.global_step == len(batches) // accumulate  # as with fp16, skipped steps count
    return module, held(module, trainer.optimizers[0])


def by_fabric(plugin: Any, batches: list[Tensor], accumulate: int, clip: float | None) -> tuple[Any, Any]:
    module, fabric = net(), fabric_with(plugin)
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers())
    for number, batch in enumerate(batches):
        loss = torch.nn.functional.mse_loss(wrapped(batch).float(), batch.flip(-1))
        fabric.backward(loss / accumulate)
        if (number + 1) % accumulate == 0:
            if clip is not None:
                fabric.clip_gradients(wrapped, optimizer, max_norm=clip)
            optimizer.step()
            optimizer.zero_grad()
    return module, held(module, optimizer.optimizer)


@every_skipping
@pytest.mark.parametrize(
    ("run", "accumulate", "clip"),
    [(by_trainer, 1, 0.1), (by_trainer, 2, None), (by_fabric, 1, None), (by_fabric, 2, 0.1)],
)
def test_a_skipped_step_leaves_no_trace(name: str, run: Any, accumulate: int, clip: float | None) -> None:
    """The NaN comes last in its accumulated step, whose good batch is lost with it."""
    good, plugin = list(random_batches(3 * accumulate + accumulate - 1)), make(name)
    first, lost, rest = good[:accumulate], good[3 * accumulate :], good[accumulate : 3 * accumulate]
    _, wanted = run(make(name), [*first, *rest], accumulate, clip)
    module, found = run(plugin, [*first, *lost, NAN, *rest], accumulate, clip)
    assert_same_tensors(found, wanted)
    assert plugin.skipped_steps == 1
    assert not torch.equal(module.layers[2].weight.detach(), net().layers[2].weight)  # it has trained


def test_without_the_option_the_nan_stays() -> None:
    module, _ = by_trainer(HalfMixed("bf16"), [NAN, *random_batches(2)], 1, None)
    assert not all(p.isfinite().all() for p in module.parameters())


# ---- counts, patience, state


def test_skipped_steps_are_counted_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, float]] = []
    monkeypatch.setattr(DummyLogger, "log_metrics", staticmethod(lambda metrics, step: logged.append(metrics)))
    plugin, logger = make("bf16"), DummyLogger()
    batches = [X, *[OVERFLOW] * 10, X, *[OVERFLOW] * 2, X]
    with caplog.at_level("INFO"):
        trainer_with(plugin, logger=logger, log_every_n_steps=2).fit(Probe(), Batches(*batches))
    assert plugin.skipped_steps == 12
    counts = [metrics["lowprec/skipped_steps"] for metrics in logged if "lowprec/skipped_steps" in metrics]
    assert counts == [0, *range(1, 11), 10, 11, 12, 12][1::2]
    assert not any("lowprec/loss_scale" in metrics for metrics in logged)
    assert [r.message for r in caplog.records if "skip_nonfinite" in r.message] == [
        "skip_nonfinite: 1 step skipped so far, because a gradient was NaN or inf.",
        "skip_nonfinite: 10 steps skipped so far, because a gradient was NaN or inf.",
    ]


def test_fifty_skipped_steps_in_a_row_end_the_run() -> None:
    fabric, module, optimizer, probe, raw = fabric_probe(make("bf16"))

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        fabric.backward(module(batch))
        optimizer.step()

    for batch in [*[OVERFLOW] * 49, X, *[OVERFLOW] * 49]:
        step(batch)
    with pytest.raises(FloatingPointError, match=r"^50 steps in a row .* `skip_nonfinite=True` .*BatchNorm.*learning"):
        step(OVERFLOW)
    assert len(raw.calls) == 1
    assert same(probe.w, -X)


def test_the_count_goes_on_after_a_resume_and_no_scale_of_1_reaches_fp16() -> None:
    first, resumed, fp16 = make("tensorwise"), make("tensorwise"), FP8TorchAO(base="fp16")
    by_fabric(first, [NAN, *random_batches(1), NAN], 1, None)
    resumed.load_state_dict(first.state_dict())
    assert (resumed.skipped_steps, resumed.state_dict()) == (2, first.state_dict())
    fp16.load_state_dict(first.state_dict())
    assert fp16.scaler.scale == 2.0**16
    resumed.load_state_dict(fp16.state_dict())
    assert resumed.scaler.scale == 1.0
    FP8TorchAO().load_state_dict(first.state_dict())  # without the option the count has no use


def test_a_resumed_trainer_is_the_run_without_the_batch(tmp_path: Any) -> None:
    batches = list(random_batches(4))
    _, wanted = by_trainer(make("bf16-master"), batches, 1, None)
    first = trainer_with(make("bf16-master"))
    first.fit(net(), Batches(*batches[:2], NAN))
    first.save_checkpoint(tmp_path / "some.ckpt")
    torch.load(tmp_path / "some.ckpt", weights_only=True)  # nothing needs pickle
    plugin, module = as_trained(make("bf16-master")), net()
    second = trainer_with(plugin, max_epochs=2)
    second.fit(module, Batches(*batches[2:]), ckpt_path=tmp_path / "some.ckpt")
    assert plugin.skipped_steps == 1
    assert_same_tensors(held(module, second.optimizers[0]), wanted)


class Pair(Net):
    """Manual optimization by two optimizers; the second one's loss is NaN where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> None:
        for i, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            factor = float("nan") if i and batch_idx == 1 else 1.0
            self.manual_backward(self(batch).square().mean() * factor)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *_, second = self.layers
        return [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (first, second)]


def test_of_two_optimizers_one_is_skipped() -> None:
    plugin, module = make("tensorwise-sr"), net(Pair)
    trainer = trainer_with(plugin)
    trainer.fit(module, random_batches(3))
    counts = [{int(entry["step"]) for entry in o.state_dict()["state"].values()} for o in trainer.optimizers]
    assert counts == [{3}, {2}]
    assert plugin.skipped_steps == 1
    assert all(p.isfinite().all() for p in module.parameters())


# ---- what goes with the option, and what does not


@pytest.mark.parametrize("make_it", [partial(HalfMixed, "fp16"), partial(FP8TorchAO, base="fp16")])
def test_fp16_skips_always(make_it: Callable[..., Any]) -> None:
    asked, plain = make_it(skip_nonfinite=True).scaler, make_it().scaler
    assert asked.scales_loss
    assert asked.state_dict() == plain.state_dict()


def test_lbfgs_cannot_be_skipped() -> None:
    class Quasi(Net):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(
        MisconfigurationException, match=r"skips steps \(`skip_nonfinite=True`\).*Leave `skip_nonfinite"
    ):
        trainer_with(make("bf16")).fit(net(Quasi), random_batches(1))


def test_an_optimizer_that_copies_gradients_early_cannot_be_skipped() -> None:
    scaler = make("bf16").scaler
    optimizer = object.__new__(CPUOffloadOptimizer)
    optimizer.param_d2h_map, optimizer.d_param_groups = {}, []
    with pytest.raises(TypeError, match="does not go with `skip_nonfinite=True`, because"):
        scaler.watch(optimizer)
