"""The base of the plugins of torchao's prototypes: a plan, layers of one arithmetic, compilation, a schedule."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.checks import Rule, check_choice
from lightning_lowprec.conversion import in_float32
from lightning_lowprec.conversion.gemms import NO_GEMM, GemmChoices, InBF16
from lightning_lowprec.conversion.invariants import unchanged
from lightning_lowprec.conversion.name_suffixes import of_options
from lightning_lowprec.conversion.options import LayerOptions, SelectionChoices, take
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.masters.options import MasterChoices, MasterOptions, WeightChoices, WeightOptions
from lightning_lowprec.precision import compiled_blocks, fp8, half_norms
from lightning_lowprec.precision.compiled_blocks import Compile
from lightning_lowprec.precision.engine import Engine
from lightning_lowprec.precision.options import (
    BASE_DTYPES,
    Base,
    HeadChoices,
    HeadOptions,
    LossScaleChoices,
    LossScaleOptions,
)
from lightning_lowprec.precision.phases import ScheduledPhases
from lightning_lowprec.precision.schedule import ScheduleChoices, ScheduleOptions
from lightning_lowprec.precision.scheduled import Scheduled
from lightning_lowprec.precision.state import BACKEND_STATE
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.torchao_prototype.arithmetic import Kind

BACKEND: Final = "torchao_prototype"
WITHOUT: Final = ("min_gain", "tokens")
"""Options of other plugins that need measured gains, which there are not for these layers."""
ProductsPerLayer = Annotated[
    Mapping[str, Literal["int8", "mxfp8", "bf16"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]


class PrototypeChoices(
    SelectionChoices, LossScaleChoices, MasterChoices, WeightChoices, HeadChoices, ScheduleChoices, total=False
):
    """The options that the plugins share with others, for type checkers."""


class TorchAOPrototype(Scheduled):
    """Base of the plugins whose layers encode both operands of every product: no state, no codes between steps.

    Args:
        recipe: the name of the arithmetic, or recipes per layer.
        base: the dtype outside of the products.
        low_eval: whether evaluation runs on codes too.
        compile: see ``compile_blocks``.
        options: of the groups that :class:`PrototypeChoices` names.
    """

    backend: ClassVar[str | None] = BACKEND
    kind: ClassVar[Literal["int8", "mxfp8"]]
    name: ClassVar[str]
    """The name for ``precision=``, without a suffix."""
    alignment: ClassVar[int] = 16
    """Features are multiples of this number."""

    def __init__(self, recipe: Any, *, base: Base, low_eval: bool, compile: Compile, options: Any) -> None:
        if not isinstance(recipe, Mapping):
            check_choice("recipe", recipe, (self.kind,))
        masters = take(MasterOptions, options).resolve(base)
        self.recipes: str | RecipeMap = (
            RecipeMap.of(recipe, names=(self.kind,), base=self.kind) if isinstance(recipe, Mapping) else recipe
        )
        """The recipe, or the recipes per layer."""
        weights = take(WeightOptions, options).keeping(getattr(self.recipes, "float32", ()))
        super().__init__(take(LossScaleOptions, options).scaler(base), masters, weights)
        require("torchao", f"{type(self).__name__}()")
        self.recipe = recipe
        self.layers = take(LayerOptions, options)
        self.head = take(HeadOptions, options).head
        self.base: Base = base
        self.low_eval = low_eval
        self.compile = compile
        self.set_schedule(take(ScheduleOptions, options).schedule)
        stem = self.name if isinstance(self.recipes, str) else f"{self.name}-per-layer"
        self.precision = stem + of_options(base, None if masters is None else masters.config.form)

    @abstractmethod
    def arithmetic(self, device: torch.device) -> Kind:
        """Return the arithmetic of the layers on ``device``."""

    @override
    def set_schedule(self, schedule: Sequence[Mapping[str, Any]] | None) -> None:
        """Follow a schedule, as the option ``schedule`` does; call this before a module is set up.

        Raises:
            ValueError: the schedule is not valid.
        """
        self.phases = ScheduledPhases.of(schedule, self.head)

    @property
    @override
    def autocast_dtype(self) -> torch.dtype:
        """``torch.bfloat16`` or ``torch.float16``: the dtype of every other operation."""
        return BASE_DTYPES[self.base]

    @property
    @override
    def peak_rate_dtype(self) -> torch.dtype:
        """``torch.int8`` where kernels run, else the base dtype; Lightning's tables list the rates of FP8 there too."""
        return fp8.peak_dtype(self)

    @override
    def refusal(self, device: torch.device) -> str | None:
        """No torchao, or one without the prototype."""
        return import_refusal("torchao", f"{type(self).__name__}()") or prototype_refusal(self.kind)

    @override
    def gathers(self, options: Any) -> str | None:
        """FSDP2 gathers values: codes are made at every product, along other dimensions each time."""
        return f"`precision={self.precision!r}` encodes a weight along its rows and along its columns, in bf16"

    @override
    def engine_refusal(self, engine: Engine) -> str | None:
        """Compiled blocks do not outlive weights that are freed."""
        return compiled_blocks.engine_refusal(engine, self.compile)

    @override
    def sharded_identity(self) -> tuple[Any, ...]:
        """The layers, and how they compute."""
        schedule = None if self.phases is None else self.phases.schedule
        return self.precision, self.recipes, self.layers, self.low_eval, schedule

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        from lightning_lowprec.torchao_prototype import convert

        if self.phases is not None:
            self.phases.forget()
        half_norms.release(module)
        in_float32.revert(module)
        convert.revert(module)  # fit, then test, makes the same plan again
        plan = fp8.plan_or_raise(
            module,
            self.layers,
            precision=self.precision,
            base=self.base,
            recipe=self.recipes if isinstance(self.recipes, RecipeMap) else "tensorwise",  # no gains are known
            head=self.head,
            conv1d=True,
            alignment=self.alignment,
            format=self.format,
        )
        with unchanged(module):
            convert.convert(
                module,
                plan.linears,
                self.arithmetic(device),
                lambda fqn: self._in_high(plan, fqn),
                low_eval=self.low_eval,
            )
        in_float32.convert(module, plan)
        if self.masters is not None or self.keeps_float32_shards:  # half-precision weights, or FSDP2's gathered ones
            half_norms.hold(module)
        if self.engine is None or not self.engine.frees_weights:
            compiled_blocks.compile_blocks(
                module,
                convert.layers_of(module),
                self.compile,
                device,
                precision=self.precision,
                advice="Encoding is slow without `torch.compile`: compile the model yourself.",
            )
        fp8.take_plan(self, module, plan, self.how(device))

    @staticmethod
    def _in_high(plan: Plan, fqn: str) -> InBF16:
        recipe = plan.recipes.get(fqn)
        return NO_GEMM if recipe is None else recipe.in_bf16

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale if the loss is scaled, and the backend that computed the products."""
        return {**super().state_dict(), BACKEND_STATE: BACKEND}
