"""FP8 training through torchao: scales are computed from each tensor, so there is no state."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final, get_args

import torch
from typing_extensions import override

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.matmuls import SOURCE
from lightning_lowprec.conversion.name_formats import GROUPED_ROUND_TO_BF16, NO_GROUPED_PRODUCT
from lightning_lowprec.conversion.options import shows, takes
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import GemmChoices
from lightning_lowprec.hardware import emulation_refusal, refusal
from lightning_lowprec.messages import info, warn
from lightning_lowprec.numerics.fp8_matrices import FastAccum
from lightning_lowprec.precision.options import EmulationOptions
from lightning_lowprec.products.formats import FORMATS
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.backend import FP8Format, Recipe
from lightning_lowprec.torchao.plugin import EXPERTS_IN_BF16, Experts, SharedOptions, TorchAO

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Settings

RecipePerLayer = Annotated[
    Mapping[str, Recipe | Literal["bf16", "fp32"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]
WeightCodes = Literal["auto", "per_forward", "per_gemm"]


@dataclass(frozen=True, kw_only=True)
class FP8TorchAOOptions(SharedOptions, EmulationOptions):
    """The arguments of :class:`FP8TorchAO`."""

    recipe: Recipe | RecipePerLayer = field(default="tensorwise", kw_only=False)
    fp8_format: FP8Format | None = None
    round_scales_to_power_of_2: bool | None = None
    weight_codes: WeightCodes = "auto"
    fast_accum: FastAccum = "forward"
    experts: Experts = "auto"
    pad_inner_dim: bool = False


@final
@shows()
class FP8TorchAO(TorchAO):
    """The GEMMs of the Linear layers in FP8, everything else under autocast; float32 weights unless told otherwise.

    Args:
        recipe: ``"tensorwise"`` (one scale per tensor, the fastest), ``"rowwise"`` (one per row, e4m3 everywhere), or
            ``"rowwise_with_gw_hp"`` (rowwise, with the weight gradient in high precision: the most accurate).
            ``"block"`` computes as DeepSeek-V3 trained: e4m3, a scale per 128 values of inputs and gradients, and per
            128 x 128 of weights. ``"mxfp8"``: e4m3, a power-of-two scale per 32 values, of weights per 32 x 32;
            features are multiples of 32, and kernels run on Blackwell. A mapping gives recipes per layer:
            ``{"blocks.0.*": "bf16", "*.o_proj": "rowwise", "*": "tensorwise"}``. The first pattern that matches an fqn
            wins; ``keep``, ``only`` and the built-in rules come before. ``"fp32"`` runs a layer in float32, with
            float32 weights, and comes before these rules: for routers and heads. A value ``{"forward": "bf16"}`` is
            tensorwise with some of the GEMMs in bf16 (forward, grad_input, grad_weight), and
            ``{"recipe": "block", "forward": "bf16"}`` another recipe.
        fp8_format: gradients in e5m2 (``"hybrid"``) or e4m3; None is the recipe's own (hybrid for tensorwise).
        round_scales_to_power_of_2: None is the recipe's own choice (True for rowwise).
        weight_codes: ``"per_forward"`` encodes a weight in each forward, and the backward reads the same codes (1 byte
            per parameter of the layers until then; FSDP2 keeps the codes of its shards instead, until a shard is
            written to). ``"per_gemm"`` encodes again in the backward, as torchao does, and under FSDP2 at every
            all-gather: same results, fewer bytes kept, more bytes moved. ``"auto"`` is ``"per_forward"`` where one
            scale per weight allows it (``recipe="tensorwise"``; with recipes per layer, the tensorwise layers).
        fast_accum: the GEMMs, those of ``head="fp8"`` too, that may add up with fewer bits than float32, which is
            faster on Hopper and Ada; other GPUs have one way to add. ``"forward"`` is torchao's choice and Transformer
            Engine's. ``"all"`` is faster, and the gradients lose bits. ``"none"`` keeps most bits; models with stacked
            experts, whose kernels always accumulate fast, then need ``experts="bf16"``.
        experts: the stacked experts of mixtures. ``"auto"`` runs their grouped products in FP8: e4m3, one scale per
            row; weights have one scale per Parameter with ``recipe="tensorwise"``. Where kernels or the base dtype do
            not allow it, experts run in the base dtype. ``"fp8"`` raises there. ``"bf16"`` keeps experts in the base
            dtype. With ``"block"`` and ``"mxfp8"`` experts stay there too:
            ``{"*.experts.*": "rowwise", "*": "block"}`` has both.
        pad_inner_dim: append zeros to layers whose features are no multiples of 16, which the kernels need. The plan
            says what the zeros cost. FSDP2 gathers these weights in high precision. False keeps these layers in the
            base dtype.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    own = "fp8_format", "weight_codes", "round_scales_to_power_of_2", "fast_accum", "experts", "pad_inner_dim"
    advice: ClassVar[str] = (
        "FP8 is slow without `torch.compile`: compile the model yourself, or use 'fp8-hybrid-te' (Transformer Engine),"
        " which needs no compiler."
    )

    @takes(FP8TorchAOOptions)
    def __init__(self, options: FP8TorchAOOptions) -> None:
        super().__init__(options.recipe, get_args(Recipe), options)
        self._check(options)
        self.fp8_format: FP8Format = options.fp8_format or ("hybrid" if "tensorwise" in self.kinds else "e4m3")
        self.round_scales_to_power_of_2 = options.round_scales_to_power_of_2
        one_scale = "tensorwise" in self.kinds
        self.weight_codes = "per_forward" if one_scale and options.weight_codes != "per_gemm" else "per_gemm"
        self.fast_accum = options.fast_accum
        self.experts: Experts = options.experts
        self.pad_inner_dim = options.pad_inner_dim
        if isinstance(self.recipe, Mapping):
            self.precision = "fp8-torchao-per-layer"
        elif self.recipe == "tensorwise" and self.fp8_format == "e4m3":
            self.precision = "fp8-e4m3"
        self.precision += self.suffix

    def _check(self, options: FP8TorchAOOptions) -> None:
        """Raise for options that no recipe of a layer reads, and for a base dtype that one does not have."""
        for kind, spec in zip(self.kinds, self.specs, strict=True):
            if self.base == "fp16" and spec.not_fp16 is not None:
                raise ValueError(
                    f"`base='fp16'` is not valid with `recipe={kind!r}`: {spec.not_fp16}. Use `base='bf16'` or"
                    " `recipe='tensorwise'`."
                )
        read = frozenset().union(*(spec.options for spec in self.specs))
        for option in self.own:
            value = getattr(options, option)
            if (
                value != getattr(FP8TorchAOOptions, option)
                and option not in read
                and (option, value) != ("weight_codes", "per_gemm")
            ):
                users = [repr(kind) for kind in get_args(Recipe) if option in FORMATS[kind].options]
                raise ValueError(
                    f"`{option}={value!r}` is not valid with `recipe={self.kinds[0]!r}`, which does not read it; it is"
                    f" for {', '.join(users)}. Leave `{option}` out."
                )
        if options.fp8_format == "hybrid" and "tensorwise" not in self.kinds:
            raise ValueError(
                f"`fp8_format='hybrid'` is not valid with `recipe={self.kinds[0]!r}`, which uses e4m3 everywhere; use"
                " `fp8_format='e4m3'` or `recipe='tensorwise'`."
            )

    @override
    def hardware_of(self, kind: str) -> RecipeKey | None:
        """One scale per tensor is made by this package, or by torchao: MI300 runs torchao's codes only."""
        by_torchao = kind == "tensorwise" and self.weight_codes == "per_gemm"
        return "tensorwise-per-gemm" if by_torchao else super().hardware_of(kind)

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        pads = any("pad_inner_dim" in spec.options for spec in self.specs)
        return {"pads": self.pad_inner_dim if pads else None, "experts": self._experts_kept(device)}

    def _experts_kept(self, device: torch.device) -> str | None:
        """Return why stacked experts stay in the base dtype; None: they convert."""
        if self.experts == "bf16":
            return EXPERTS_IN_BF16
        if not any(spec.experts for spec in self.specs):
            return NO_GROUPED_PRODUCT
        reason, emulate = None, self.emulates(device)
        if self.base == "fp16":
            reason = GROUPED_ROUND_TO_BF16
        elif isinstance(emulate, str) and (unable := emulation_refusal("experts", emulate)) is not None:
            reason = f"stacked experts ({unable})"
        elif not emulate and device.type == "cpu":  # which multiplies float8, with `emulate=False`
            reason = "stacked experts (cpu has no FP8 kernel for grouped products)"
        elif not emulate and (unable := refusal("experts", device)) is not None:
            reason = f"stacked experts ({unable})"
        if reason is not None and self.experts == "fp8":
            raise ValueError(f"`experts='fp8'` is not possible: {reason}. Use `experts='bf16'`.")
        return reason

    @override
    def layer_recipes(self, device: torch.device) -> "Settings":
        return replace(
            super().layer_recipes(device),
            fp8_format=self.fp8_format,
            round_scales_to_power_of_2=self.round_scales_to_power_of_2,
            saves_weight_codes=self.weight_codes == "per_forward",
            fast_accum=self.fast_accum,
        )

    @override
    def say(self, plan: Plan, device: torch.device) -> None:
        figures = all(spec.arithmetic is None for spec in self.specs)
        slow = plan.below_break_even() if figures else ()
        if self.emulates(device):
            info(f"{self.precision}: {self.how(device)}.")
        elif slow and device.type == "cuda":  # the published figures are those of a GPU
            names = ", ".join(f"{row.fqn} ({row.in_features} -> {row.out_features})" for row in slow[:3])
            every = len(slow) == len(plan.converted)
            keeps = "`plugins=FP8TorchAO(keep=[...])` keeps them in bf16."
            warn(
                f"`precision={self.precision!r}`: {len(slow)} of {len(plan.converted)} converted layers are expected to"
                f" be slower in FP8 than in bf16 ({SOURCE}): {names}{', ...' if len(slow) > 3 else ''}."
                f" {'`bf16-mixed` is expected to be faster here.' if every else keeps}"
            )
