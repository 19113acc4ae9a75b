"""The stacked experts of a mixture with grouped products in FP8; see :mod:`~lightning_lowprec.conversion.experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.experts import (
    RoutedExperts,
    grouped_product,
    is_transposed,
    matrices,
    release_experts,
    take_experts,
)
from lightning_lowprec.conversion.gemms import GEMMS, NO_GEMM, InBF16
from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.recipe_map import LayerRecipe
from lightning_lowprec.numerics.groups import Groups
from lightning_lowprec.private.torch import are_transforms_active
from lightning_lowprec.products.scaled import Scaled
from lightning_lowprec.products.transforms import check_call
from lightning_lowprec.torchao.grouped import GroupedRecipe, grouped_matmul
from lightning_lowprec.torchao.settings import LayerSettings
from lightning_lowprec.torchao.wire_format import TorchAOWire

_ALIGNMENT = 16


@final
class FP8Experts(PlainFirst, RoutedExperts):
    """Stacked experts whose products run in FP8, for any batch, under autocast of any device."""

    settings: dict[str, LayerSettings]
    """By the name of a Parameter whose products run in FP8; those of others run in the dtype of autocast."""
    recipes: dict[str, GroupedRecipe]
    """How the products of these Parameters run now, with the phase of a schedule."""
    phase_gemms: InBF16
    """The products that the phase of a schedule computes in high precision."""
    fp8_eval: bool
    saves_weight_codes: bool
    """Whether the backward may read the codes of a weight that the forward made."""

    @property
    def alignment(self) -> int:  # type: ignore[override]
        """16 where a product runs in FP8."""
        return _ALIGNMENT if any(self._in_fp8(name) for name in self.recipes) else 1

    def takes(self, hidden_states: Tensor) -> bool:
        """Every call."""
        if are_transforms_active() or torch.compiler.is_exporting():
            check_call("FP8 experts")
        return True

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """[P, K] -> [P, N]."""
        if not self._in_fp8(name):
            return grouped_product(rows, matrices(self, name), groups)
        keep = self.saves_weight_codes and self.settings[name].products.saves_weight
        return grouped_matmul(
            rows, self.weight(name), groups.ends, self.recipes[name], transposed=is_transposed(self), keep=keep
        )

    def _in_fp8(self, name: str) -> bool:
        runs = name in self.recipes and (self.training or self.fp8_eval)
        return runs and len(self.recipes[name].in_bf16) < len(GEMMS)

    # ---- FSDP2

    @property
    def wired(self) -> tuple[str, ...]:
        """The names of the Parameters that FSDP2 may gather as float8: those with one scale."""
        return tuple(name for name, recipe in self.recipes.items() if recipe.one_scale)

    @property
    def wire_format(self) -> TorchAOWire | None:
        """The format in which FSDP2 may gather these Parameters."""
        return next((self.settings[name].wire_format for name in self.wired), None)

    @property
    def reads_values(self) -> bool:
        """Whether a product reads a weight in high precision now."""
        return any({"forward", "grad_input"} & set(recipe.in_bf16) for recipe in self.recipes.values())

    # ---- other precisions for the same layer

    def set_phase(self, gemms: InBF16) -> None:
        """Compute these products in high precision, beside those of the recipes."""
        self.phase_gemms = gemms
        self._update()

    def reconfigure(self, recipe: LayerRecipe) -> None:
        """Give all Parameters another recipe; ``recipe.name`` is None for the recipe that each has."""
        changed = {}
        for name, own in self.settings.items():
            if recipe.name is not None:
                assert own.others is not None  # the user's config keeps experts in high precision
                changed[name] = own.others.of(recipe)
            else:
                changed[name] = replace(own, in_bf16=recipe.in_bf16)
        self.settings = changed
        self._update()

    def _update(self) -> None:
        self.recipes = {name: recipe_of(own, self.phase_gemms) for name, own in self.settings.items()}


def recipe_of(settings: LayerSettings, phase: InBF16 = NO_GEMM) -> GroupedRecipe:
    """Return how products run in a phase."""
    forward = settings.products.forward
    assert isinstance(forward, Scaled)
    high: InBF16 = frozenset({"grad_weight"}) if settings.products.grad_weight is None else NO_GEMM
    return GroupedRecipe(
        one_scale=not forward.weight.by_row,
        in_bf16=tuple(sorted(settings.in_bf16 | phase | high)),
        round_scales_to_power_of_2=forward.weight.power_of_2,
        emulate=forward.emulate,
    )


def convert(
    model: nn.Module, fqns: Sequence[str], settings_of: Callable[[str], LayerSettings], *, low_eval: bool
) -> None:
    """Let the products of the stacked Parameters ``fqns`` run in FP8, in place."""
    found: dict[str, dict[str, LayerSettings]] = {}
    for fqn in fqns:
        module, _, name = fqn.rpartition(".")
        found.setdefault(module, {})[name] = settings_of(fqn)
    for fqn, settings in found.items():
        recipes = {name: recipe_of(own) for name, own in settings.items()}
        attributes = {"settings": settings, "recipes": recipes, "fp8_eval": low_eval}
        take_experts(
            model.get_submodule(fqn), FP8Experts, {**attributes, "saves_weight_codes": True, "phase_gemms": NO_GEMM}
        )


def fp8_experts(model: nn.Module) -> list[FP8Experts]:
    """Return the experts of ``model`` that run in FP8."""
    return [module for module in model.modules() if isinstance(module, FP8Experts)]


def revert(model: nn.Module) -> None:
    """Give experts their own class back, in place."""
    for module in fp8_experts(model):
        release_experts(module)
