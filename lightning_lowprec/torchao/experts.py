"""The stacked experts of a mixture with grouped products in FP8; see :mod:`~lightning_lowprec.conversion.experts`.

Rows are sorted by expert, and each expert has one weight:

    output       [P, N]     = rows [P, K]   @ weight [E, K, N]
    grad_rows    [P, K]     = grad [P, N]   @ weight.T [E, N, K]
    grad_weight  [E, N, K]  = grad.T [N, P] @ rows [P, K], per group

Everything is e4m3, gradients too: kernels for grouped products take no e5m2. Rows have one scale each. Weights have one
scale per row of what is multiplied, or one for the whole Parameter: then the codes are the same for both products.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion.declared import PlainFirst, is_declared
from lightning_lowprec.conversion.experts import RoutedExperts, grouped_product, matrices, take_experts
from lightning_lowprec.conversion.recipe_map import NO_GEMM, Gemm, InBF16
from lightning_lowprec.numerics.grouped_fp8 import encode_columns, encode_rows, encode_weight, encode_whole, product
from lightning_lowprec.numerics.groups import Groups
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.products.arithmetic import Products
from lightning_lowprec.products.coded_weight import CodedWeight
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.products.transforms import check_backward, check_call, refuse_forward_mode
from lightning_lowprec.torchao.settings import LayerSettings
from lightning_lowprec.torchao.wire_format import TorchAOWire


@final
class FP8Experts(PlainFirst, RoutedExperts):
    """Stacked experts whose products run in FP8, for any batch, under autocast of any device."""

    settings: dict[str, LayerSettings]
    """By the name of a Parameter whose products run in FP8; those of others run in the dtype of autocast."""
    in_bf16: dict[str, tuple[Gemm, ...]]
    """The products of these Parameters in high precision."""
    fp8_eval: bool
    saves_weight_codes: bool
    """Whether the backward may read the codes of a weight that the forward made."""

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """16 where a product runs in FP8."""
        return Scaled.tokens if any(map(self._in_fp8, self.settings)) else 1

    def takes(self, hidden_states: Tensor) -> bool:
        """Every call, except where the program has switched autocast off."""
        if not torch.is_autocast_enabled(hidden_states.device.type) and is_declared(self):
            return False
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call("FP8 experts")
        return True

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """[P, K] -> [P, N]."""
        if not self._in_fp8(name):
            return grouped_product(rows, matrices(self, name), groups)
        products, transposed = self.settings[name].products, self.is_transposed
        keep = self.saves_weight_codes and products.saves_weight
        weight, how, high = self.weight(name), format_of(products), self.in_bf16[name]
        return grouped_matmul(rows, weight, groups.ends, how, high, transposed=transposed, keep=keep)

    def _in_fp8(self, name: str) -> bool:
        return name in self.settings and (self.training or self.fp8_eval)

    # ---- FSDP2

    @property
    def wired(self) -> tuple[str, ...]:
        """The names of the Parameters that FSDP2 may gather as float8: their codes serve both products."""
        return tuple(name for name, own in self.settings.items() if own.wire_format is not None)

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 may gather these Parameters."""
        return next((self.settings[name].wire_format for name in self.wired), None)


def format_of(products: Products) -> Scaled:
    """Return how stacked experts are encoded; all their products are e4m3."""
    assert isinstance(products.forward, Scaled)
    return products.forward


def high_of(settings: LayerSettings) -> tuple[Gemm, ...]:
    """Return the products that run in high precision."""
    of_recipe: InBF16 = frozenset({"grad_weight"}) if settings.products.grad_weight is None else NO_GEMM
    return tuple(sorted(settings.in_bf16 | of_recipe))


def convert(
    model: nn.Module, fqns: Sequence[str], settings_of: Callable[[str], LayerSettings], *, fp8_eval: bool
) -> None:
    """Let the products of the stacked Parameters ``fqns`` run in FP8, in place."""
    by_module: dict[str, dict[str, LayerSettings]] = {}
    for fqn in fqns:
        module, _, name = fqn.rpartition(".")
        by_module.setdefault(module, {})[name] = settings = settings_of(fqn)
        if not format_of(settings.products).fast:
            raise ValueError(
                "`fast_accum='none'` is not possible for stacked experts, whose kernels always accumulate fast. Use"
                " `experts='bf16'`."
            )
    for fqn, by_name in by_module.items():
        in_bf16 = {name: high_of(settings) for name, settings in by_name.items()}
        attributes = {"settings": by_name, "in_bf16": in_bf16, "fp8_eval": fp8_eval, "saves_weight_codes": True}
        take_experts(model.get_submodule(fqn), FP8Experts, attributes)


def fp8_experts(model: nn.Module) -> list[FP8Experts]:
    """Return the experts of ``model`` that run in FP8."""
    return [module for module in model.modules() if isinstance(module, FP8Experts)]


# ---- the products


def grouped_matmul(
    rows: Tensor,
    weight: Tensor,
    ends: Tensor,
    how: Scaled,
    in_bf16: tuple[Gemm, ...] = (),
    *,
    transposed: bool,
    keep: bool = False,
) -> Tensor:
    """[P, K] -> [P, N] in the dtype of ``rows``, which are sorted by expert; those of each begin at a multiple of 16.

    ``weight`` is [E, N, K], or [E, K, N] if it is ``transposed``; K and N are multiples of 16. ``ends``: [E] int32, the
    row behind each expert's last. ``keep``: whether the backward reads the codes of a weight that serve both products,
    or makes them again.
    """
    output: Tensor = _GroupedMatmul.apply(rows, weight, ends, transposed, keep, how, in_bf16)  # type: ignore[no-untyped-call]
    return output


@final
@torch.compiler.allow_in_graph  # traced by the compiler of torch 2.11, it loses its gradients
class _GroupedMatmul(torch.autograd.Function):
    jvp = staticmethod(refuse_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        transposed: bool,
        keep: bool,
        how: Scaled,
        in_bf16: tuple[Gemm, ...],
    ) -> Tensor:
        kept: Sequence[Tensor] = ()
        high = "forward" in in_bf16
        if keep and not high and not isinstance(weight, CodedWeight):
            kept = encode_whole(weight, how.weight.power_of_2)
        ctx.save_for_backward(rows, weight, ends, *(kept if ctx.needs_input_grad[0] else ()))
        ctx.transposed, ctx.how, ctx.in_bf16 = transposed, how, in_bf16
        return _times(rows, weight, kept, ends, how, in_bf16=high, across=transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("FP8 experts")
        rows, weight, ends, *kept = ctx.saved_tensors
        grad, high = grad.contiguous(), ctx.in_bf16
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            across = not ctx.transposed
            grad_rows = _times(grad, weight, kept, ends, ctx.how, in_bf16="grad_input" in high, across=across)
        if ctx.needs_input_grad[1]:
            left, right = (rows, grad) if ctx.transposed else (grad, rows)
            grad_weight = _grad_weight(left, right, ends, ctx.how, in_bf16="grad_weight" in high)
        return grad_rows, grad_weight, *(None,) * 5


def _times(
    rows: Tensor, weight: Tensor, kept: Sequence[Tensor], ends: Tensor, how: Scaled, *, in_bf16: bool, across: bool
) -> Tensor:
    """[P, C], [E, A, C], or ``across`` [E, C, A] -> [P, A]."""
    if in_bf16:
        factor = weight.to(rows.dtype)
        return F.grouped_mm(rows, factor if across else factor.mT, offs=ends)
    codes, inverse = encode_rows(rows, how.weight.power_of_2)
    right, of_right = _factor(weight, kept, how, across=across)
    return product(codes, right.mT, (inverse, of_right), ends, rows.dtype, emulate=how.emulate)


def _grad_weight(left: Tensor, right: Tensor, ends: Tensor, how: Scaled, *, in_bf16: bool) -> Tensor:
    """[P, A], [P, C] -> [E, A, C]: the sum over the rows of each group."""
    if in_bf16:
        return F.grouped_mm(left.t(), right, offs=ends)
    codes, inverse = encode_columns(left.contiguous(), ends, how.weight.power_of_2)
    others, of_others = encode_columns(right.contiguous(), ends, how.weight.power_of_2)
    return product(codes, others.t(), (inverse, of_others), ends, left.dtype, emulate=how.emulate)


def _factor(weight: Tensor, kept: Sequence[Tensor], how: Scaled, *, across: bool) -> tuple[Tensor, Tensor]:
    """[E, A, C], or ``across`` [E, C, A] -> codes, contiguous along the last dimension, and reciprocals of scales."""
    if isinstance(weight, CodedWeight):
        codes, scale = weight.codes_and_scale()
        kept = codes, scale.reciprocal()
    if kept:
        codes, inverse = kept
        codes = codes.mT.contiguous() if across else codes
    else:
        encode = encode_weight if how.weight.by_row else encode_whole
        codes, inverse = encode(weight.mT if across else weight, how.weight.power_of_2)
    return codes, inverse if inverse.dim() else inverse.expand(codes.shape[:2]).contiguous()
