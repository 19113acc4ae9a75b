"""FP8 training through torchao: scales are computed from each tensor, so there is no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import Unpack, override

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.gains import SOURCE, Recipe
from lightning_lowprec.conversion.name_formats import GROUPED_ROUND_TO_BF16
from lightning_lowprec.conversion.options import shows
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.conversion.recipe_map import GemmChoices
from lightning_lowprec.hardware import emulation_refusal, refusal
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.schedule import Schedule
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.backend import NAMES, FastAccum, FP8Format
from lightning_lowprec.torchao.plugin import EXPERTS_IN_BF16, SHARED, Experts, SharedChoices, TorchAO

if TYPE_CHECKING:
    from lightning_lowprec.torchao.settings import Recipes

RecipePerLayer = Annotated[
    Mapping[str, Recipe | Literal["bf16", "fp32"] | GemmChoices], Rule("a mapping of patterns of fqns to recipes")
]
WeightCodes = Literal["auto", "per_forward", "per_gemm"]
CPU_SCALES_TENSORWISE = torch.__version__ < "2.13"
"""Whether ``torch._scaled_mm`` on CPU takes one scale per tensor only; given more, it fails an internal assert."""


@final
@shows(*SHARED)
class FP8TorchAO(TorchAO):
    """The GEMMs of the Linear layers in FP8, everything else under autocast; float32 weights unless told otherwise.

    Args:
        recipe: ``"tensorwise"`` (one scale per tensor, the fastest), ``"rowwise"`` (one per row, e4m3 everywhere), or
            ``"rowwise_with_gw_hp"`` (rowwise, with the weight gradient in high precision: the most accurate). A mapping
            gives recipes per layer: ``{"blocks.0.*": "bf16", "*.o_proj": "rowwise", "*": "tensorwise"}``. The first
            pattern that matches an fqn wins; ``keep``, ``only`` and the built-in rules come before. ``"fp32"`` runs a
            layer in float32, with float32 weights, and comes before these rules: for routers and heads. A value
            ``{"forward": "bf16"}`` is tensorwise with some of the GEMMs in bf16 (forward, grad_input, grad_weight).
        fp8_format: gradients in e5m2 (``"hybrid"``) or e4m3; None is the recipe's own (hybrid for tensorwise).
        round_scales_to_power_of_2: None is the recipe's own choice (True for rowwise).
        weight_codes: ``"per_forward"`` encodes a weight in each forward, and the backward reads the same codes (1 byte
            per parameter of the layers until then; FSDP2 keeps the codes of its shards instead, until a shard is
            written to). ``"per_gemm"`` encodes again in the backward, as torchao does, and under FSDP2 at every
            all-gather: same results, fewer bytes kept, more bytes moved. ``"auto"`` is ``"per_forward"`` where one
            scale per weight allows it (``recipe="tensorwise"``; with recipes per layer, the tensorwise layers).
        fast_accum: the GEMMs that may add up with fewer bits than float32, which is faster on Hopper and Ada; other
            GPUs have one way to add. ``"forward"`` is torchao's choice and Transformer Engine's. ``"all"`` is faster,
            and the gradients lose bits. ``"none"`` keeps most bits; models with stacked experts, whose kernels always
            accumulate fast, then need ``experts="bf16"``.
        experts: the stacked experts of mixtures. ``"auto"`` runs their grouped products in FP8: e4m3, one scale per
            row; weights have one scale per Parameter with ``recipe="tensorwise"``. Where kernels or the base dtype do
            not allow it, experts run in the base dtype. ``"fp8"`` raises there. ``"bf16"`` keeps experts in the base
            dtype.
        pad_inner_dim: append zeros to layers whose features are no multiples of 16, which the kernels need. The plan
            says what the zeros cost. FSDP2 gathers these weights in high precision. False keeps these layers in the
            base dtype.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    own = "weight_codes", "round_scales_to_power_of_2", "fast_accum", "experts", "pad_inner_dim"
    advice: ClassVar[str] = (
        "FP8 is slow without `torch.compile`: compile the model yourself, or use 'fp8-hybrid-te' (Transformer Engine),"
        " which needs no compiler."
    )

    def __init__(
        self,
        recipe: Recipe | RecipePerLayer = "tensorwise",
        *,
        fp8_format: FP8Format | None = None,
        round_scales_to_power_of_2: bool | None = None,
        weight_codes: WeightCodes = "auto",
        fast_accum: FastAccum = "forward",
        experts: Experts = "auto",
        pad_inner_dim: bool = False,
        **options: Unpack[SharedChoices],
    ) -> None:
        super().__init__(recipe, get_args(Recipe), options)
        _check(self.kinds, self.base, fp8_format)
        self.fp8_format: FP8Format = fp8_format or ("hybrid" if "tensorwise" in self.kinds else "e4m3")
        self.round_scales_to_power_of_2 = round_scales_to_power_of_2
        one_scale = "tensorwise" in self.kinds
        if weight_codes == "per_forward" and not one_scale:
            raise ValueError(
                f"`weight_codes='per_forward'` is not valid with `recipe={self.kinds[0]!r}`: only one scale per weight"
                " is the same in forward and backward. Use `recipe='tensorwise'`, or leave `weight_codes` out."
            )
        self.weight_codes = "per_forward" if one_scale and weight_codes != "per_gemm" else "per_gemm"
        self.fast_accum: FastAccum = fast_accum
        self.experts: Experts = experts
        self.pad_inner_dim = pad_inner_dim
        if isinstance(recipe, Mapping):
            self.precision = "fp8-torchao-per-layer" + self.suffix
        else:
            self.precision = NAMES[recipe, self.fp8_format] + self.suffix

    @override
    def check_schedule(self, phases: Schedule) -> None:
        """Refuse a product as FP8 that the recipe computes in bf16."""
        if "rowwise_with_gw_hp" in self.kinds:
            phases.check_fp8(frozenset({"grad_weight"}), "recipe='rowwise_with_gw_hp'")

    @property
    @override
    def hardware_recipe(self) -> RecipeKey:
        """One scale per tensor is made by this package, or by torchao: MI300 runs torchao's codes only."""
        if self.recipe != "tensorwise":
            return "rowwise" if self.recipe == "rowwise" else "rowwise-gw-hp"
        return "tensorwise" if self.weight_codes == "per_forward" else "tensorwise-per-gemm"

    @override
    def refusal(self, device: torch.device) -> str | None:
        if (
            device.type == "cpu"
            and not self.emulates(device)
            and self.kinds != ("tensorwise",)
            and CPU_SCALES_TENSORWISE
        ):
            return f"torch {torch.__version__} has no rowwise FP8 kernel for CPU (2.13 has). Leave `emulate` alone"
        reason = fp8.kernel_refusal(self.hardware_recipe, self.emulate, device, "FP8TorchAO(..., emulate=True)")
        return reason or super().refusal(device)

    @override
    def gathers(self, options: Any) -> str | None:
        if "tensorwise" not in self.kinds:
            return f"`recipe={self.recipe!r}` has a scale per row, and only one per tensor can be gathered"
        return None if self.fp8_eval else "`fp8_eval=False` evaluates with the weights in high precision"

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        return {"pads": self.pad_inner_dim, "experts": self._experts_kept(device)}

    def _experts_kept(self, device: torch.device) -> str | None:
        """Return why stacked experts stay in the base dtype; None: they convert."""
        if self.experts == "bf16":
            return EXPERTS_IN_BF16
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
    def layer_recipes(self, device: torch.device) -> Recipes:
        from lightning_lowprec.torchao.settings import Settings

        return Settings(
            fp8_format=self.fp8_format,
            emulate=self.emulates(device),
            round_scales_to_power_of_2=self.round_scales_to_power_of_2,
            saves_weight_codes=self.weight_codes == "per_forward",
            fast_accum=self.fast_accum,
        )

    @override
    def say(self, plan: Plan, device: torch.device) -> None:
        slow = plan.below_break_even()
        if self.emulates(device):
            rank_zero_info(f"{self.precision}: {self.how(device)}.")
        elif slow and device.type == "cuda":  # the published figures are those of a GPU
            names = ", ".join(f"{row.fqn} ({row.in_features} -> {row.out_features})" for row in slow[:3])
            rank_zero_warn(
                f"`precision={self.precision!r}`: {len(slow)} of {len(plan.converted)} converted layers are expected to"
                f" be slower in FP8 than in bf16 ({SOURCE}): {names}{', ...' if len(slow) > 3 else ''}."
                " `plugins=FP8TorchAO(keep=[...])` keeps them in bf16."
            )


def _check(kinds: tuple[str, ...], base: str, fp8_format: str | None) -> None:
    rowwise = next((kind for kind in kinds if kind != "tensorwise"), None)
    if rowwise is not None and base == "fp16":
        raise ValueError(
            f"`base='fp16'` is not valid with `recipe={rowwise!r}`, whose kernels round their output through bf16;"
            " use `base='bf16'` or `recipe='tensorwise'`."
        )
    if rowwise is not None and fp8_format == "hybrid" and "tensorwise" not in kinds:
        raise ValueError(
            f"`fp8_format='hybrid'` is not valid with `recipe={rowwise!r}`, which uses e4m3 everywhere; use"
            " `fp8_format='e4m3'` or `recipe='tensorwise'`."
        )
