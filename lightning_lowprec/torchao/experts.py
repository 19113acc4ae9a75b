"""The stacked experts of a mixture with grouped products in FP8; see :mod:`~lightning_lowprec.conversion.experts`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.experts import RoutedExperts, grouped_product, matrices
from lightning_lowprec.conversion.roles import take_role
from lightning_lowprec.conversion.transforms import check_call
from lightning_lowprec.numerics.groups import Groups
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.torchao.grouped import GroupedRecipe, grouped_matmul


@final
class FP8Experts(RoutedExperts):
    """Stacked experts whose products run in FP8, for any batch, under autocast of any device."""

    recipe: GroupedRecipe
    in_fp8: frozenset[str]
    """The names of the Parameters whose products run in FP8; those of others run in the dtype of autocast."""
    fp8_eval: bool
    alignment = 16

    def takes(self, hidden_states: Tensor) -> bool:
        """Every call."""
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call("FP8 experts")
        return True

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """[P, K] -> [P, N]."""
        experts: Any = self
        if name not in self.in_fp8 or not (self.training or self.fp8_eval):
            return grouped_product(rows, matrices(experts, name), groups)
        weight = getattr(experts, name)
        return grouped_matmul(rows, weight, groups.ends, None, self.recipe, transposed=experts.is_transposed)


def convert(model: nn.Module, fqns: Sequence[str], recipe: GroupedRecipe, *, fp8_eval: bool) -> None:
    """Let the products of the stacked Parameters ``fqns`` run in FP8, in place."""
    names: dict[str, set[str]] = {}
    for fqn in fqns:
        module, _, name = fqn.rpartition(".")
        names.setdefault(module, set()).add(name)
    for fqn, found in names.items():
        attributes = {"recipe": recipe, "in_fp8": frozenset(found), "fp8_eval": fp8_eval}
        take_role(model.get_submodule(fqn), FP8Experts, attributes)


def fp8_experts(model: nn.Module) -> list[FP8Experts]:
    """Return the experts of ``model`` that run in FP8."""
    return [module for module in model.modules() if isinstance(module, FP8Experts)]


def revert(model: nn.Module) -> None:
    """Give experts their own class back, in place."""
    for module in fp8_experts(model):
        in_place.revert(module)
