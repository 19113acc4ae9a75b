"""The base of the plugins of torchao's formats: a plan, layers whose products run on codes, compilation, a schedule.

The plugins are in `fp8.py` and `one_format.py`: options, names, and the arithmetic of the layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.conversion import module_dtypes
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.name_suffixes import of_options
from lightning_lowprec.conversion.options import LayerChoices, LayerOptions, take
from lightning_lowprec.conversion.plan import Plan, PlanRequest
from lightning_lowprec.conversion.recipe_map import LayerRecipe, RecipeMap
from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.fp8 import BlockChoices, BlockOptions, Scheduled
from lightning_lowprec.precision.host import Engine
from lightning_lowprec.precision.options import (
    EmulationChoices,
    FP8Choices,
    FP8Options,
    MasterChoices,
    MasterOptions,
    TrainingChoices,
    TrainingOptions,
)
from lightning_lowprec.precision.schedule import ScheduleChoices, ScheduleOptions
from lightning_lowprec.precision.state import BACKEND_STATE
from lightning_lowprec.torchao.backend import NAME

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Recipes


Experts = Literal["auto", "fp8", "bf16"]
EXPERTS_IN_BF16: Final = "stacked experts (experts='bf16')"
SHARED: Final = (LayerOptions, FP8Options, BlockOptions, TrainingOptions, MasterOptions, ScheduleOptions)
"""The options of every plugin of torchao's formats."""


class SharedChoices(
    LayerChoices,
    FP8Choices,
    EmulationChoices,
    BlockChoices,
    TrainingChoices,
    MasterChoices,
    ScheduleChoices,
    total=False,
):
    """The same, for type checkers."""


class TorchAO(Scheduled):
    """Base of the plugins: no state, and no codes between steps.

    ``recipe`` is what the user wrote: one of ``names``, or recipes per layer, the first of ``names`` unless they say
    another. ``options``: the other options of the constructor.
    """

    backend: ClassVar[str | None] = NAME
    own: ClassVar[tuple[str, ...]] = ()
    """The options of the subclass, by attribute, that are built into a model when it is sharded."""
    advice: ClassVar[str] = "Encoding is slow without `torch.compile`: compile the model yourself."

    def __init__(self, recipe: Any, names: tuple[str, ...], options: Any) -> None:
        recipes: Any = RecipeMap.of(recipe, names=names, base=names[0]) if isinstance(recipe, Mapping) else recipe
        training = take(TrainingOptions, options).keeping(recipes.float32 if isinstance(recipes, RecipeMap) else ())
        running = take(FP8Options, options)
        masters = take(MasterOptions, options).resolve(running.base)
        super().__init__(training.scaler(running.base), masters, training)
        require("torchao", f"{type(self).__name__}(recipe={recipe!r})")
        self.recipe, self.recipes = recipe, recipes
        self.kinds: tuple[str, ...] = recipes.names if isinstance(recipes, RecipeMap) else (recipes,)
        """The recipes that the layers have."""
        self.base, self.fp8_eval, self.emulate = running.base, running.fp8_eval, running.emulation
        self.compile = take(BlockOptions, options).compile
        self.layers = take(LayerOptions, options)
        self.set_schedule(take(ScheduleOptions, options).schedule)

    @property
    def suffix(self) -> str:
        """The end of the precision's name: the base dtype, or what is kept beside bf16 weights."""
        return of_options(self.base, None if self.masters is None else self.masters.config.kept)

    @abstractmethod
    def layer_recipes(self, device: torch.device) -> Recipes:
        """Return what gives each recipe its settings."""

    def plan_options(self, device: torch.device) -> dict[str, Any]:
        """Return the fields of the ``PlanRequest`` that the format decides."""
        return {}

    @override
    def refusal(self, device: torch.device) -> str | None:
        return import_refusal("torchao.float8", f"`precision={self.precision!r}`")

    @override
    def engine_refusal(self, engine: Engine) -> str | None:
        return fp8.engine_refusal(engine, self.compile)

    @override
    def sharded_identity(self) -> tuple[Any, ...]:
        schedule = None if self.phases is None else self.phases.schedule
        own = (getattr(self, name) for name in self.own)
        return self.precision, self.recipes, self.layers, self.fp8_eval, self.emulate, schedule, *own

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        from lightning_lowprec.torchao import experts, hooks, linear

        if self.phases is not None:
            self.phases.forget()
        hooks.revert(module)  # fit, then test, makes the same plan again
        plan = fp8.plan_or_raise(
            module,
            self.layers,
            PlanRequest(base=self.base, head=self.head, **{"recipe": self.recipes, **self.plan_options(device)}),
            precision=self.precision,
        )
        recipes, default = self.layer_recipes(device), LayerRecipe(self.kinds[0])
        with unchanged(module):
            for convert, fqns in ((linear.convert, plan.linears), (experts.convert, plan.stacked)):
                convert(module, fqns, lambda fqn: recipes.of(plan.recipes.get(fqn, default)), fp8_eval=self.fp8_eval)
        module_dtypes.run_in_float32(module, plan)
        if self.masters is not None or self.engine is not None or self.keeps_float32_shards:
            module_dtypes.hold_half_norms(module)  # weights are in half precision, or FSDP2's gathered ones are
        if self.engine is not None and self.engine.frees_weights:
            linear.save_no_weight_codes(module)
            rank_zero_info(
                f"{self.precision}: {self.engine.name} frees weights after each use: {self.format} encodes them at"
                " every product, and no block is compiled."
            )
        elif plan.converted:
            layers = linear.coded_layers(module)
            fp8.compile_blocks(module, layers, self.compile, device, precision=self.precision, advice=self.advice)
        if fp8.take_plan(self, module, plan):
            self.say(plan, device)

    @override
    def cast_shards(self, module: Module) -> None:
        from lightning_lowprec.torchao import linear

        super().cast_shards(module)
        linear.save_no_weight_codes(module)  # FSDP2 frees gathered weights after their layer ran

    def say(self, plan: Plan, device: torch.device) -> None:
        """Log a new plan's device."""
        rank_zero_info(f"{self.precision}: {self.how(device)}.")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), BACKEND_STATE: NAME}
