"""Cross-entropy of some rows of logits, and the gradient of the logits, in one kernel per call on CUDA.

With ``p = softmax(x)`` of one row ``x`` of V logits, ``lse = log(sum(exp(x)))``, target ``t``, label smoothing ``e``
and factor ``z`` of the z-loss:

    loss    = lse - (1 - e) * x[t] - e * mean(x) + z * lse**2
    d/dx[v] = (1 + 2 * z * lse) * p[v] - (1 - e) * [v == t] - e / V

The gradient of a row is that of its own loss: no mean is taken, so its values lie between -1 and 1 (without z-loss)
for any number of rows. A small format holds such values with a scale that is known in advance. Rows whose target is
``ignore_index`` have loss 0 and gradient 0. All arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import E5M2
from lightning_lowprec.numerics.one_pass import rows_in_one_pass

CODE_SCALE: Final = 2.0**14
"""The scale of gradients in float8_e5m2: values up to 3.5 have a code, which leaves room for the z-loss, and 2**-28 is
a normal number. The average of 128k probabilities is 2**-17. float8_e4m3fn would lose those below 2**-18."""


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of the loss of one row; see the module."""

    ignore_index: int = -100
    """Rows with this target have no loss."""
    label_smoothing: float = 0.0
    """``e``: the part of the target's probability that is spread over all classes."""
    z_loss: float = 0.0
    """``z``: the factor of ``lse**2``."""

    @property
    def constants(self) -> tuple[int, float, float]:
        """The terms as arguments of the functions of this module."""
        return self.ignore_index, self.label_smoothing, self.z_loss


def losses_alone(logits: Tensor, target: Tensor, terms: LossTerms) -> Tensor:
    """(M, V) any float, (M,) int64 -> (M,) float32."""
    losses: Tensor = rows_in_one_pass(_losses, logits, target, *terms.constants)
    return losses


def losses_and_gradient_(logits: Tensor, target: Tensor, factors: Tensor, terms: LossTerms) -> Tensor:
    """(M, V) any float, (M,) int64, (M,) or () float32 -> (M,) float32; ``logits`` become their gradient.

    ``factors`` multiply the gradient, and leave the losses alone.
    """
    losses: Tensor = rows_in_one_pass(_losses_and_gradient_, logits, target, factors, *terms.constants)
    return losses


def losses_and_codes(logits: Tensor, target: Tensor, factors: Tensor, terms: LossTerms) -> tuple[Tensor, Tensor]:
    """(M, V) any float, (M,) int64, (M,) or () float32 -> losses (M,) float32, gradient (M, V) float8_e5m2.

    The codes are ``gradient * factors * CODE_SCALE``. A value beyond the format becomes its largest value; NaN stays.
    """
    losses, codes = rows_in_one_pass(_losses_and_codes, logits, target, factors, *terms.constants)
    return losses, codes


def _log_sum_exp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return top + (x - top).exp().sum(-1, keepdim=True).log()


def _losses(logits: Tensor, target: Tensor, *terms: Any) -> Tensor:
    x = logits.float()
    return _loss(x, _log_sum_exp(x), target, *terms)


def _loss(x: Tensor, lse: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    counts = target != ignore_index
    at_target = x.gather(-1, torch.where(counts, target, 0)[:, None])
    loss = lse - at_target
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - x.mean(-1, keepdim=True))
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(counts, loss[:, 0], 0.0)


def _gradient(
    x: Tensor, lse: Tensor, target: Tensor, factors: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    gradient = (x - lse).exp()
    if z_loss:
        gradient = gradient * (1 + 2 * z_loss * lse)
    classes = torch.arange(x.shape[-1], device=x.device)
    gradient = gradient - torch.where(classes == target[:, None], 1 - label_smoothing, 0.0)
    if label_smoothing:
        gradient = gradient - label_smoothing / x.shape[-1]
    factors = torch.where(target != ignore_index, factors, 0.0)[:, None]
    return torch.where(factors == 0, 0.0, gradient * factors)


def _losses_and_gradient_(logits: Tensor, target: Tensor, factors: Tensor, *terms: Any) -> Tensor:
    x = logits.float()
    lse = _log_sum_exp(x)
    losses = _loss(x, lse, target, *terms)
    logits.copy_(_gradient(x, lse, target, factors, *terms))
    return losses


def _losses_and_codes(logits: Tensor, target: Tensor, factors: Tensor, *terms: Any) -> tuple[Tensor, Tensor]:
    x = logits.float()
    lse = _log_sum_exp(x)
    losses = _loss(x, lse, target, *terms)
    gradient = _gradient(x, lse, target, factors * CODE_SCALE, *terms)
    return losses, gradient.clamp(-E5M2.max, E5M2.max).to(E5M2.dtype)
