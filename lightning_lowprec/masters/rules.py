"""What a step of an optimizer needs to see at once, and the update rules that the kernel knows.

Operations and names are those of ``torch.optim``'s ``_single_tensor_adam`` and ``_single_tensor_sgd``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_lowprec.numerics.from_host import tensor_on
from lightning_lowprec.private.torch_optimizers import has_step_hooks

_ALONE: Final = tuple(
    getattr(optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD", "SparseAdam",
    )
    if hasattr(optim, name)
)  # fmt: skip
ALONE: Final = "independent_parameters"
"""An attribute by which the class of an optimizer says that it updates each parameter without looking at others."""
NUMBERS: Final = 9
"""Numbers of a parameter for the kernel, see :func:`numbers_of`."""


@final
@dataclass(frozen=True)
class Rule:
    """An update rule of the kernel."""

    kernel: Literal["adam", "sgd", "momentum", "nesterov"]
    moments: tuple[str, ...]
    """The names of the optimizer's state that has the shape of the parameter."""
    counts: bool = False
    """Whether the state has a ``step``."""


def steps_alone(optimizer: Optimizer, plain: type) -> bool:
    """Return whether ``optimizer``, of class ``plain``, may step its parameters in several calls, some at a time.

    True for the classes of ``torch.optim`` except LBFGS, and for classes that say so (:data:`ALONE`). Step hooks must
    see all masters at once.
    """
    return (plain in _ALONE or vars(plain).get(ALONE) is True) and not has_step_hooks(optimizer)


def rule_of(plain: type, group: Mapping[str, Any]) -> Rule | None:
    """Return the kernel's rule for a parameter group of an optimizer of class ``plain``, or None."""
    if group.get("differentiable"):
        return None
    if plain in (optim.Adam, optim.AdamW):
        if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return None
        return Rule("adam", ("exp_avg", "exp_avg_sq"), counts=True)
    if plain is not optim.SGD or any(isinstance(group[name], Tensor) for name in ("momentum", "dampening")):
        return None
    if not group["momentum"]:
        return Rule("sgd", ())
    return Rule("nesterov" if group["nesterov"] else "momentum", ("momentum_buffer",))


def numbers_of(rule: Rule, plain: type, group: Mapping[str, Any], steps: Sequence[Tensor], count: int) -> Tensor:
    """Return the numbers of ``count`` parameters of a group for the kernel: (count, 9) float32.

    Columns: the factor of the gradient (-1 to maximize), L2 penalty, decay of the weight, share of the gradient in the
    first moment (momentum), decay of the second moment (share of the gradient in the momentum), share of the squared
    gradient, minus the step size, eps, square root of the second bias correction.

    Args:
        rule: the rule of the group.
        plain: the class of the optimizer.
        group: a parameter group. Its learning rate may be a tensor.
        steps: the number of steps of each parameter, this one included: (count,) scalars, if the rule counts.
        count: the number of parameters.

    Returns:
        On the device of the learning rate and the steps. Nothing is read from a GPU.
    """
    lr, sign = group["lr"], -1.0 if group["maximize"] else 1.0
    devices = {t.device for t in (lr, *steps) if isinstance(t, Tensor)} - {torch.device("cpu")}
    device = devices.pop() if devices else torch.device("cpu")
    rate = torch.as_tensor(lr, dtype=torch.float64, device=device) if isinstance(lr, Tensor) else float(lr)
    if rule.kernel != "adam":
        columns = [sign, group["weight_decay"], 1.0, group["momentum"], 1.0 - group["dampening"], 0.0, -rate, 0.0, 1.0]
        return _table(columns, count, device)
    beta1, beta2 = group["betas"]
    if device.type == "cpu":
        step: Tensor = torch.tensor([float(s) for s in steps], dtype=torch.float64)
    else:
        step = torch.stack([s.to(device, non_blocking=True) for s in steps]).double()
    decoupled = group.get("decoupled_weight_decay", plain is optim.AdamW)
    decay = group["weight_decay"]
    columns = [
        sign,
        0.0 if decoupled else decay,
        1.0 - rate * decay if decoupled else 1.0,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        -rate / (1.0 - beta1**step),
        group["eps"],
        (1.0 - beta2**step).sqrt(),
    ]
    return _table(columns, count, device)


def _table(columns: Sequence[float | Tensor], count: int, device: torch.device) -> Tensor:
    numbers = [column for column in columns if not isinstance(column, Tensor)]
    constant = iter(tensor_on(device, numbers, torch.float64))
    parts = [column if isinstance(column, Tensor) else next(constant) for column in columns]
    return torch.stack([part.expand(count) for part in parts], dim=1).float()
