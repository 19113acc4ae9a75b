"""Loss scaling for fp16.

fp16 gradients below 6e-8 become zero. Multiplying the loss by a scale moves them into range; the gradients are
divided by it before the optimizer sees them. A dynamic scale grows after ``growth_interval`` good steps and backs
off when a gradient is not finite; that step is skipped (Micikevicius et al., arXiv 1710.03740, sec. 3.2).

Invariant: every gradient that is not yet unscaled carries the *current* scale. When the scale changes, gradients
that other optimizers have accumulated under the old one are brought to the new one.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.masters.optimizer import drop_grads, has_masters, held_masters, move_grads_to_masters

LossScaleInput = Literal["dynamic"] | float


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss is scaled. The defaults are those of ``torch.amp.GradScaler``, with a floor."""

    initial: float = 2.0**16
    """The scale of the first step."""
    growth_factor: float = 2.0
    """Multiplies the scale after ``growth_interval`` good steps in a row; 1.0 never grows."""
    backoff_factor: float = 0.5
    """Multiplies the scale on a step with a non-finite gradient; 1.0 never backs off."""
    growth_interval: int = 2000
    """Good steps in a row before the scale grows."""
    hysteresis: int = 1
    """Overflows until the scale backs off, counted since it last grew, as in Megatron (2 there): then each one does."""
    floor: float = 1.0
    """The scale never backs off below this."""
    patience_at_floor: int = 50
    """Skipped steps in a row at the floor after which the run stops with an error."""

    def __post_init__(self) -> None:
        """Check every field; nothing is changed here."""
        checks = {
            "initial": (self.floor <= self.initial < math.inf, f"finite and at least floor={self.floor!r}"),
            "growth_factor": (1.0 <= self.growth_factor < math.inf, "finite and at least 1.0"),
            "backoff_factor": (0.0 < self.backoff_factor <= 1.0, "in (0, 1]"),
            "growth_interval": (
                isinstance(self.growth_interval, int) and self.growth_interval >= 1,
                "an integer of at least 1",
            ),
            "hysteresis": (isinstance(self.hysteresis, int) and self.hysteresis >= 1, "an integer of at least 1"),
            "floor": (self.floor > 0.0, "above 0"),
            "patience_at_floor": (self.patience_at_floor >= 1, "at least 1"),
        }
        for name, (valid, allowed) in checks.items():
            if not valid:
                raise ValueError(f"`{name}={getattr(self, name)!r}` is not valid; expected {allowed}.")

    @classmethod
    def of(cls, value: LossScaleInput | LossScale) -> LossScale:
        """``"dynamic"``, a number (a static scale) or a LossScale, as a LossScale."""
        if isinstance(value, LossScale):
            return value
        if value == "dynamic":
            return cls()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return cls(initial=float(value), growth_factor=1.0, backoff_factor=1.0, floor=float(value))
        raise ValueError(
            f"`loss_scale={value!r}` is not valid; expected 'dynamic', a number above 0 (a static scale), a LossScale."
        )


class LossScaler:
    """Scales losses, unscales gradients, and skips the steps whose gradients are not finite.

    The scale lives on the host: the skip decision already needs one device-to-host read a step, as in
    ``torch.amp.GradScaler``, and everything after that is plain arithmetic.
    """

    def __init__(self, config: LossScale) -> None:
        self.config = config
        self.scale: float = config.initial
        self.skipped_steps: int = 0
        self._good_steps: int = 0
        self._overflows_left: int = config.hysteresis
        self._skipped_at_floor: int = 0
        self._found_inf: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()
        self._carried: weakref.WeakKeyDictionary[Optimizer, list[Tensor]] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def get_scale(self) -> float:
        """The current scale; the name is that of ``torch.amp.GradScaler``, which loggers know."""
        return self.scale

    def watch(self, optimizer: Optimizer) -> None:
        """Make an optimizer known, so that its gradients follow when the scale changes."""
        self._optimizers.add(optimizer)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """``loss * scale``; any shape, fp16 becomes float32 (a scaled loss seldom fits into 65504)."""
        for optimizer in list(self._found_inf):  # unscaled for clipping, never stepped: another backward follows
            self._carried[optimizer] = self._found_inf.pop(optimizer)  # clipping may have hidden what it found
            _multiply_grads(optimizer, self.scale)
        return (loss.float() if loss.dtype == torch.float16 else loss) * self.scale

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale in place, once per step, and note non-finite ones."""
        self.watch(optimizer)
        if optimizer in self._found_inf:
            return
        if has_masters(optimizer):
            move_grads_to_masters(optimizer)
        found = self._carried.pop(optimizer, [])
        for device, grads in _grads_by_device_and_dtype(optimizer):
            found_inf = torch.zeros((), device=device)
            inv_scale = torch.full((), 1.0 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
            found.append(found_inf)
        self._found_inf[optimizer] = found

    def found_inf(self, optimizer: Optimizer) -> bool:
        """Whether the unscaled gradients of this step hold a non-finite value (reads from the device)."""
        return any(flag.item() > 0 for flag in self._found_inf.get(optimizer, ()))

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Unscale if that was not done yet, step unless a gradient is not finite, and update the scale."""
        self.unscale(optimizer)
        skip = self.found_inf(optimizer)
        if skip:  # `model.zero_grad()` does not reach gradients that were moved to masters
            drop_grads(optimizer)
        output = None if skip else optimizer.step(**kwargs)
        del self._found_inf[optimizer]
        self._update(skip, stepped=optimizer)
        return output

    def _update(self, skipped: bool, stepped: Optimizer) -> None:
        old = self.scale
        if skipped:
            self.skipped_steps += 1
            self._good_steps = 0
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
            self._rescale_pending_gradients(self.scale / old, stepped)

    def _back_off(self) -> None:
        self._overflows_left -= 1
        if self._overflows_left > 0:
            return
        lower = max(self.scale * self.config.backoff_factor, self.config.floor)
        at_floor, self.scale = lower == self.scale, lower
        self._skipped_at_floor = self._skipped_at_floor + 1 if at_floor else 0
        if self._skipped_at_floor >= self.config.patience_at_floor:
            raise FloatingPointError(
                f"{self._skipped_at_floor} steps in a row had non-finite gradients at the lowest loss scale"
                f" ({self.config.floor:g}), so nothing is learned any more. Scaling cannot help: look for NaN or inf in"
                " the data or the loss, lower the learning rate, or use a bf16 precision, which has the range of fp32."
            )

    def _rescale_pending_gradients(self, factor: float, stepped: Optimizer) -> None:
        for optimizer in self._optimizers:
            if optimizer is not stepped and optimizer not in self._found_inf:
                _multiply_grads(optimizer, factor)

    def state_dict(self) -> dict[str, Any]:
        """The state under the keys of ``torch.amp.GradScaler`` (plain numbers), so that either loads the other's."""
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
        """Restore the scale and the count of good steps; factors and intervals stay as configured here."""
        if self.config.growth_factor == self.config.backoff_factor == 1.0:
            return
        self.scale = max(float(state["scale"]), self.config.floor)
        self._good_steps = int(state["_growth_tracker"])
        self._overflows_left = int(state.get("_overflows_left", self.config.hysteresis))
        self.skipped_steps = int(state.get("skipped_steps", 0))
        self._skipped_at_floor = 0

    def __getstate__(self) -> dict[str, Any]:
        """Optimizers stay behind: they belong to the process that holds them."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_found_inf", "_carried", "_optimizers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start with no optimizer known."""
        self.__dict__.update(state)
        self._found_inf = weakref.WeakKeyDictionary()
        self._carried = weakref.WeakKeyDictionary()
        self._optimizers = weakref.WeakSet()

    def __repr__(self) -> str:
        """The scale and how it moves."""
        return f"{type(self).__name__}(scale={self.scale:g}, config={asdict(self.config)})"


def _multiply_grads(optimizer: Optimizer, factor: float) -> None:
    for _, grads in _grads_by_device_and_dtype(optimizer):
        torch._foreach_mul_(grads, factor)


def _grads_by_device_and_dtype(optimizer: Optimizer) -> Iterator[tuple[torch.device, list[Tensor]]]:
    groups: dict[tuple[torch.device, torch.dtype, Any], list[Tensor]] = defaultdict(list)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param in (*params, *held_masters(optimizer)):
        if param.grad is None:
            continue
        if param.grad.is_sparse:
            param.grad = param.grad.coalesce()  # duplicate rows could overflow only when they are summed
        grad = param.grad._values() if param.grad.is_sparse else param.grad
        groups[grad.device, grad.dtype, getattr(grad, "device_mesh", None)].append(grad)
    for (device, *_), grads in groups.items():
        yield device, grads
