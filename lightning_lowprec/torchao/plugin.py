"""The base of the plugins of torchao's formats: a plan, layers whose products run on codes, and compilation.

The plugins are in `fp8.py` and `int8.py`: options and names. The rows of `products/formats.py` say the rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.checks import Rule, abstract
from lightning_lowprec.conversion import module_dtypes
from lightning_lowprec.conversion.backends import PlanRequest, imported
from lightning_lowprec.conversion.in_place import unchanged
from lightning_lowprec.conversion.name_formats import of_options
from lightning_lowprec.conversion.options import LayerOptions, take
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import GemmChoices, LayerRecipe, RecipeMap
from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.hardware import describe
from lightning_lowprec.messages import info
from lightning_lowprec.precision import fp8, refusals
from lightning_lowprec.precision.fp8 import BlockOptions, Converting
from lightning_lowprec.precision.host import Engine
from lightning_lowprec.precision.options import EmulationOptions, FP8Options, MasterOptions, TrainingOptions
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.products.block import by_cublas
from lightning_lowprec.products.formats import FORMATS, FormatSpec
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.backend import NAME

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Settings


CPU_SCALES_TENSORWISE = torch.__version__ < "2.13"
"""Whether ``torch._scaled_mm`` on CPU takes one scale per tensor only; given more, it fails an internal assert."""
Experts = Literal["auto", "fp8", "bf16"]
ProductsPerLayer = Annotated[
    Mapping[str, Literal["int8", "bf16", "fp32"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]
EXPERTS_IN_BF16: Final = "stacked experts (experts='bf16')"


@dataclass(frozen=True, kw_only=True)
class SharedOptions(LayerOptions, FP8Options, BlockOptions, TrainingOptions, MasterOptions):
    """The options of every plugin of torchao's formats."""


@abstract
class TorchAO(Converting):
    """Base of the plugins: no state, and no codes between steps.

    ``recipe`` is what the user wrote: one of ``names``, or recipes per layer, the first of ``names`` unless they say
    another. ``options``: the other options of the constructor.
    """

    backend: ClassVar[str | None] = NAME
    own: ClassVar[tuple[str, ...]] = ()
    """The options of the subclass, by attribute, that are built into a model when it is sharded."""
    advice: ClassVar[str] = "Encoding is slow without `torch.compile`: compile the model yourself."

    def __init__(self, recipe: str | Mapping[str, object], names: tuple[str, ...], options: SharedOptions) -> None:
        recipes = RecipeMap.of(recipe, names=names, base=names[0]) if isinstance(recipe, Mapping) else recipe
        options = replace(options, keep_fp32=(*options.keep_fp32, *getattr(recipes, "float32", ())))
        masters = options.resolve(options.base)
        super().__init__(options.scaler(options.base), masters, options)
        require("torchao", f"{type(self).__name__}(recipe={recipe!r})")
        self.recipe, self.recipes = recipe, recipes
        self.kinds: tuple[str, ...] = recipes.names if isinstance(recipes, RecipeMap) else (recipes,)
        """The recipes that the layers have."""
        self.specs: tuple[FormatSpec, ...] = tuple(FORMATS[kind] for kind in self.kinds)
        titles = {spec.title for spec in self.specs}
        self.format = titles.pop() if len(titles) == 1 else "FP8"  # type: ignore[misc]
        self.precision = self.specs[0].precision
        self.base, self.fp8_eval = options.base, options.fp8_eval
        emulation = options.emulation if isinstance(options, EmulationOptions) else False
        self.emulate = emulation if any(spec.emulates for spec in self.specs) else False
        self.compile = options.compile
        self.layers = take(LayerOptions, options)

    @property
    def suffix(self) -> str:
        """The end of the precision's name: the base dtype, or what is kept beside bf16 weights."""
        return of_options(self.base, None if self.masters is None else self.masters.config.kept)

    def layer_recipes(self, device: torch.device) -> "Settings":
        """Return what gives each recipe its settings; this imports torchao."""
        from lightning_lowprec.torchao.settings import Settings

        by_recipe = {kind: self.arithmetic(kind, device) for kind in self.kinds}
        arithmetics = {kind: arithmetic for kind, arithmetic in by_recipe.items() if arithmetic is not None}
        return Settings(emulate=self.emulates(device), arithmetics=arithmetics)

    def arithmetic(self, kind: str, device: torch.device) -> Arithmetic | None:
        """Return how a recipe computes; None: as torchao's configuration says."""
        spec = FORMATS[kind]
        options = {"emulate": self.emulates(device)} if spec.emulates else {}
        return None if spec.arithmetic is None else imported(spec.arithmetic)(**options)

    def plan_options(self, device: torch.device) -> dict[str, Any]:
        """Return the fields of the ``PlanRequest`` that an option decides."""
        return {}

    def hardware_of(self, kind: str) -> RecipeKey | None:
        """Return the row of the table of what runs where of a recipe."""
        return FORMATS[kind].hardware

    @property
    @override
    def hardware_recipe(self) -> RecipeKey | None:
        return self.hardware_of(self.kinds[0])

    @override
    def refusal(self, device: torch.device) -> str | None:
        one = None if isinstance(self.recipes, RecipeMap) else self.refusal_of(self.recipes, device)
        return import_refusal("torchao.float8", f"`precision={self.precision!r}`") or one

    def refusal_of(self, kind: str, device: torch.device) -> str | None:
        """Return why layers with a recipe cannot run on a device, and the remedy."""
        spec = FORMATS[kind]
        if (lacking := prototype_refusal(kind)) is not None or not spec.emulates:
            return lacking
        emulates = self.emulates(device)
        if device.type == "cpu" and not emulates and spec.cpu != "always":
            if spec.cpu == "never":
                return f"cpu has no {spec.title} kernels. Leave `emulate=False` out"
            if CPU_SCALES_TENSORWISE:
                return f"torch {torch.__version__} has no rowwise FP8 kernel for CPU (2.13 has). Leave `emulate` alone"
        hardware = self.hardware_of(kind)
        assert hardware is not None
        refused = fp8.kernel_refusal(hardware, self.emulate, device, f"{type(self).__name__}(..., emulate=True)")
        by_triton = kind == "block" and not emulates and not by_cublas(device)
        return refused or (prototype_refusal("block-triton") if by_triton else None)

    @override
    def how(self, device: torch.device) -> str:
        if self.kinds != ("block",) or self.emulates(device):
            return super().how(device)
        kernels = "cuBLASLt" if by_cublas(device) else "torchao's Triton kernels"
        return f"FP8 GEMMs with a scale per block by {kernels} on {describe(device)}"

    @override
    def gathers(self, options: object) -> str | None:
        """FSDP2 gathers codes that serve all products of a weight, else values."""
        gathered = [kind for kind, spec in zip(self.kinds, self.specs, strict=True) if spec.one_code]
        if not gathered:
            return f"`recipe={self.recipe!r}` encodes a weight for the forward and once more for the backward"
        if len(gathered) > 1:
            return f"{' and '.join(map(repr, gathered))} in `recipe` have different scales"
        return None if self.fp8_eval else "`fp8_eval=False` evaluates with the weights in high precision"

    @override
    def engine_refusal(self, engine: Engine) -> str | None:
        if self.layers.frozen == "codes":
            return "its engine casts weights, and `frozen='codes'` has none. Use 'ddp' or 'fsdp2'"
        if engine.frees_weights and self.compile not in ("auto", False):
            return f"`compile={self.compile!r}` compiles blocks whose weights are freed. Leave it out, or use stage 2"
        return None

    @override
    def sharded_identity(self) -> tuple[object, ...]:
        own = (getattr(self, name) for name in self.own)
        return self.precision, self.recipes, self.layers, self.fp8_eval, self.emulate, *own

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        from lightning_lowprec.torchao import experts, frozen, linear

        linear.revert(module)  # fit, then test, makes the same plan again
        plan = fp8.plan_or_raise(
            module,
            self.layers,
            PlanRequest(
                recipe=self.recipes,
                alignment=min(spec.features for spec in self.specs),
                format=self.format,
                base=self.base,
                head=self.head,
                frozen_codes=all(spec.stores_codes for spec in self.specs),
                **self.plan_options(device),
            ),
            precision=self.precision,
        )
        for kind in self.kinds if isinstance(self.recipes, RecipeMap) else ():
            fqn = next((fqn for fqn, recipe in plan.recipes.items() if recipe.name == kind), None)
            if fqn is not None and (reason := self.refusal_of(kind, device)) is not None:
                raise RuntimeError(f"`recipe={kind!r}` of layer {fqn!r} cannot run: {reason}.")
        recipes, default = self.layer_recipes(device), LayerRecipe(self.kinds[0])
        with unchanged(module):
            for convert, fqns in ((linear.convert, plan.linears), (experts.convert, plan.stacked)):
                convert(module, fqns, lambda fqn: recipes.of(plan.recipes.get(fqn, default)), fp8_eval=self.fp8_eval)
        module_dtypes.run_in_float32(module, plan)
        if self.layers.frozen == "codes":
            refusals.refuse_unfreezing(module)
            if self.modules.sharded is not None and torch.__version__ < "2.13":  # FSDP2 wants gradients of every weight
                raise RuntimeError(
                    f"`frozen='codes'` under FSDP2 needs torch 2.13, got {torch.__version__}. Use 'ddp', or"
                    " `frozen='convert'`."
                )
            info(f"{self.precision}: {frozen.store(module)}.")
        if self.masters is not None or self.engine is not None or self.keeps_float32_shards:
            module_dtypes.hold_half_norms(module)  # weights are in half precision, or FSDP2's gathered ones are
        if self.engine is not None and self.engine.frees_weights:
            linear.save_no_weight_codes(module)
            info(
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
        info(f"{self.precision}: {self.how(device)}.")
