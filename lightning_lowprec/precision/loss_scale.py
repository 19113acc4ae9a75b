"""Loss scaling for fp16, steps that are skipped in every precision, and what checkpoints hold of both.

fp16 gradients below 6e-8 become zero. A loss that is multiplied by a scale has gradients in fp16's range; the gradients
are divided by the scale before the optimizer sees them. A dynamic scale grows after ``growth_interval`` good steps. It
backs off when a gradient is not finite, and this step is skipped (Micikevicius et al., arXiv 1710.03740, sec. 3.2).

Invariant: every gradient that is not yet unscaled has the *current* scale. When the scale changes, gradients that
other optimizers have accumulated with the old scale are multiplied to have the new scale.

bf16 needs no scale. With ``skip_nonfinite=True`` its steps are skipped by the same :class:`LossScaler`, whose scale is
then 1 and never changes.
"""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.checks import Count, Rule
from lightning_lowprec.conversion.options import shows
from lightning_lowprec.masters import step as masters_step
from lightning_lowprec.masters.optimizer import held_masters
from lightning_lowprec.masters.registry import registry_of
from lightning_lowprec.messages import info
from lightning_lowprec.numerics.parameters import grouped, mesh_of, parameters_of
from lightning_lowprec.private.torch import LOSS_SCALING, check, multiply_all_, unscale_all_
from lightning_lowprec.private.torch_optimizers import refuse_copies

StaticScale = Annotated[float, Rule("a number above 0 (a static scale)", lambda scale: scale > 0)]
Positive = Annotated[float, Rule("finite and above 0", lambda scale: scale > 0)]


@shows()
@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The options of loss scaling. The defaults are those of ``torch.amp.GradScaler``, with a floor."""

    initial: Positive = 2.0**16
    """The scale of the first step."""
    growth_factor: Annotated[float, Rule("finite and at least 1.0", lambda factor: factor >= 1.0)] = 2.0
    """Multiplies the scale after ``growth_interval`` good steps in a row; with 1.0 the scale never grows."""
    backoff_factor: Annotated[float, Rule("in (0, 1]", lambda factor: 0.0 < factor <= 1.0)] = 0.5
    """Multiplies the scale on a step with a non-finite gradient; with 1.0 the scale never backs off."""
    growth_interval: Count = 2000
    """Good steps in a row before the scale grows."""
    hysteresis: Count = 1
    """The scale backs off at this many overflows since it last grew, and at every later overflow until it grows.

    Megatron has the same option, with the default 2.
    """
    floor: Positive = 1.0
    """The scale never backs off below this value."""
    patience_at_floor: Count = 50
    """After this many skipped steps in a row at the floor, the run stops with an error."""

    def __post_init__(self) -> None:
        if self.initial < self.floor:
            raise ValueError(f"`initial={self.initial!r}` is not valid; expected at least floor={self.floor!r}.")

    @classmethod
    def of(cls, value: 'Literal["dynamic"] | float | LossScale') -> "LossScale":
        """Return ``"dynamic"``, a number (a static scale) or a LossScale as a LossScale."""
        if isinstance(value, LossScale):
            return value
        if value == "dynamic":
            return cls()
        return cls(initial=float(value), growth_factor=1.0, backoff_factor=1.0, floor=float(value))


_NEVER_SCALED: Final = (
    "this precision scales the loss, and no loss was scaled since the last step of this optimizer: its gradients would"
    " be divided by a scale that they do not have. Call `self.manual_backward(loss)` in a LightningModule or"
    " `fabric.backward(loss)` before each step, in place of `loss.backward()`. For gradients that you assign"
    " yourself use a bf16 precision."
)


@dataclass
class _Gradients:
    """The gradients of one optimizer, between two of its steps."""

    unscaled: bool = False
    found_inf: list[Tensor] = field(default_factory=list)  # above 0 where gradients that were unscaled were not finite
    skips: bool = False  # whether a flag that was read from the device was above 0
    after: int = 0  # how many losses had been scaled at the step before

    def read(self) -> bool:
        """Return whether an unscaled gradient is not finite; read the flags from the device, all in one, once."""
        if self.found_inf:
            first, *others = (flag.reshape(()) for flag in self.found_inf)
            largest = torch.stack([first, *(flag.to(first.device) for flag in others)]).amax() if others else first
            self.skips |= bool(largest.item() > 0)
            self.found_inf = []
        return self.skips


@final
class LossScaler:
    """Scales losses, unscales gradients, and skips the steps whose gradients are not finite.

    The scale is a number on the host. The decision to skip needs one read from the device per step, as in
    ``torch.amp.GradScaler``. ``config`` None leaves losses and gradients as they are, and only skips steps.
    """

    def __init__(self, config: LossScale | None) -> None:
        check(LOSS_SCALING)
        self.scales_loss = config is not None
        self.config = LossScale.of(1.0) if config is None else config
        self.scale: float = self.config.initial
        self.skipped_steps: int = 0
        self._good_steps: int = 0
        self._overflows_left: int = self.config.hysteresis
        self._skipped_at_floor: int = 0
        self._scaled_losses: int = 0
        self._gradients: weakref.WeakKeyDictionary[Optimizer, _Gradients] = weakref.WeakKeyDictionary()

    def get_scale(self) -> float:
        """Return the current scale; loggers know this name from ``torch.amp.GradScaler``."""
        return self.scale

    def watch(self, optimizer: Optimizer) -> None:
        """Remember an optimizer, to multiply its gradients when the scale changes; refuse one that copies gradients."""
        what = "`skip_nonfinite=True`, because it copies gradients before all of them are known to be finite"
        if self.scales_loss:
            what = "loss scaling, because it copies gradients before they are divided by the scale"
        refuse_copies(optimizer, what)
        self._gradients.setdefault(optimizer, _Gradients())

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss * scale``, of any shape; fp16 becomes float32 (a scaled loss seldom fits into 65504)."""
        for optimizer, gradients in self._gradients.items():
            if gradients.unscaled:  # for clipping, and another backward follows before a step
                gradients.unscaled = False  # `found_inf` stays: clipping may have hidden non-finite values
                masters_step.multiply_waiting()
                if self.scales_loss:
                    _multiply_grads(optimizer, self.scale)
        if not self.scales_loss:
            return loss
        self._scaled_losses += 1
        return (loss.float() if loss.dtype == torch.float16 else loss) * self.scale

    def unscale(self, optimizer: Optimizer, *, defer: bool = False) -> None:
        """Divide the optimizer's gradients by the scale, once per step, and note whether they are finite.

        With ``defer``, gradients of parameters with masters may stay as they are until the step.
        """
        self.watch(optimizer)
        gradients = self._gradients[optimizer]
        if gradients.unscaled:
            return
        inv_scale = 1.0 / self.scale
        params: list[Tensor] = [*parameters_of(optimizer), *held_masters(optimizer)]
        if self.scales_loss and gradients.after == self._scaled_losses and any(p.grad is not None for p in params):
            raise RuntimeError(_NEVER_SCALED)
        registry = registry_of(optimizer)
        if registry is not None and defer and masters_step.defers(optimizer):
            gradients.found_inf.append(masters_step.unscale(optimizer, inv_scale))
            params = registry.without_master()
        elif registry is not None:
            masters_step.move_grads(registry)
        gradients.found_inf += [unscale_all_(grads, inv_scale) for grads in _groups_of_grads(params)]
        gradients.unscaled = True

    def found_inf(self, optimizer: Optimizer) -> bool:
        """Return whether a gradient, unscaled by now, is not finite (reads from the device, once per step)."""
        return self._gradients[optimizer].read()

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Unscale the gradients if they are still scaled, step if all are finite, and update the scale."""
        self.unscale(optimizer, defer=True)
        skip = self.found_inf(optimizer)
        if skip and (registry := registry_of(optimizer)) is not None:
            masters_step.drop_grads(registry)  # `model.zero_grad()` does not reach gradients that were moved to masters
        output = None if skip else optimizer.step(**kwargs)
        self._gradients[optimizer] = _Gradients(after=self._scaled_losses)
        self._update(skip, stepped=optimizer)
        return output

    def _update(self, skipped: bool, stepped: Optimizer) -> None:
        old = self.scale
        if skipped:
            self.skipped_steps += 1
            self._good_steps = 0
            count = str(self.skipped_steps)
            if not self.scales_loss and count == "1" + "0" * (len(count) - 1):  # the 1st, 10th, 100th, ...
                steps = "1 step" if count == "1" else f"{count} steps"
                info(f"skip_nonfinite: {steps} skipped so far, because a gradient was NaN or inf.")
            self._back_off()
        else:
            self._good_steps += 1
            self._skipped_at_floor = 0
            if self._good_steps >= self.config.growth_interval:
                if self.scale * self.config.growth_factor <= torch.finfo(torch.float32).max:
                    self.scale *= self.config.growth_factor
                self._good_steps = 0
                self._overflows_left = self.config.hysteresis
        if self.scale != old:
            for optimizer, gradients in self._gradients.items():
                if optimizer is not stepped and not gradients.unscaled:
                    _multiply_grads(optimizer, self.scale / old)

    def _back_off(self) -> None:
        self._overflows_left -= 1
        if self._overflows_left > 0:
            return
        lower = max(self.scale * self.config.backoff_factor, self.config.floor)
        at_floor, self.scale = lower == self.scale, lower
        self._skipped_at_floor = self._skipped_at_floor + 1 if at_floor else 0
        if self._skipped_at_floor < self.config.patience_at_floor:
            return
        what = (
            f" at the lowest loss scale ({self.config.floor:g}), so nothing is learned any more. Scaling cannot help:"
            " look for NaN or inf in the data or the loss, lower the learning rate, or use a bf16 precision, which has"
            " the range of fp32."
        )
        if not self.scales_loss:
            what = (
                ", and `skip_nonfinite=True` has skipped them, so nothing is learned any more. Look for NaN or inf in"
                " the data, the loss, the weights or running statistics (BatchNorm), or lower the learning rate."
            )
        raise FloatingPointError(f"{self._skipped_at_floor} steps in a row had non-finite gradients{what}")

    def state_dict(self) -> dict[str, object]:
        """Return plain numbers under the keys of ``torch.amp.GradScaler``: either class loads the other's state."""
        return {
            "scale": self.scale,
            "growth_factor": self.config.growth_factor,
            "backoff_factor": self.config.backoff_factor,
            "growth_interval": self.config.growth_interval,
            "_growth_tracker": self._good_steps,
            "_overflows_left": self._overflows_left,
            "skipped_steps": self.skipped_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and the counts; a scale that never changes, factors and intervals stay as they are."""
        self.skipped_steps = int(state.get("skipped_steps", 0))
        if self.config.growth_factor == self.config.backoff_factor == 1.0:
            return
        self.scale = max(float(state["scale"]), self.config.floor)
        self._good_steps = int(state["_growth_tracker"])
        self._overflows_left = int(state.get("_overflows_left", self.config.hysteresis))
        self._skipped_at_floor = 0

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_gradients"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _gradients=weakref.WeakKeyDictionary())


def _multiply_grads(optimizer: Optimizer, factor: float) -> None:
    for grads in _groups_of_grads([*parameters_of(optimizer), *held_masters(optimizer)]):
        multiply_all_(grads, factor)


def _groups_of_grads(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the gradients (values of sparse ones), of masters too, in lists of one device, dtype and mesh each.

    A gradient that a parameter shows for its master is in one list once.
    """
    first: dict[int, Tensor] = {}
    for param in params:
        if param.grad is not None:
            first.setdefault(id(param.grad), param)
    grads = []
    for param in first.values():
        assert param.grad is not None
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()  # sums duplicate rows first, because only the sum may overflow
        grads.append(param.grad.values() if param.grad.is_sparse else param.grad)
    return grouped(grads, lambda grad: (grad.device, grad.dtype, mesh_of(grad)))


SCALER_STATE: Final = "loss_scale"  # key of the loss scale in a plugin's state
BACKEND_STATE: Final = "backend"  # key of the backend's name in a plugin's state
SKIPS_STATE: Final = "skipped_steps"
"""Key of the number of skipped steps in the state of a plugin that does not scale the loss."""
LIGHTNINGS: Final = ("MixedPrecision", "FSDPPrecision")  # plugins of Lightning whose state has a loss scale


def load_loss_scale(scaler: LossScaler | None, state: Mapping[str, Any], precision: str) -> None:
    """Restore the loss scale from the state of our plugins or of Lightning's ``MixedPrecision`` (a GradScaler's)."""
    scales = scaler is not None and scaler.scales_loss
    if scaler is not None:
        scaler.skipped_steps = int(state.get(SKIPS_STATE, scaler.skipped_steps))
    stored = state.get(SCALER_STATE, state if "_growth_tracker" in state else None)
    if not stored:
        return
    if scaler is not None and scales:
        scaler.load_state_dict(stored)
    else:
        info(f"Dropped the loss scale of the checkpoint: `precision={precision!r}` needs none.")


def foreign_states(checkpoint: Mapping[str, object], plugin: type, root: type) -> list[dict[str, object]]:
    """Return the states of other plugins below ``root`` in a Trainer's checkpoint; none beside that of ``plugin``."""
    if plugin.__qualname__ in checkpoint:
        return []
    below: list[type] = root.__subclasses__()
    for child in below:  # the list grows: children of children
        below += child.__subclasses__()
    states = [checkpoint.get(name) for name in (*LIGHTNINGS, *(cls.__qualname__ for cls in below))]
    return [state for state in states if isinstance(state, dict)]
