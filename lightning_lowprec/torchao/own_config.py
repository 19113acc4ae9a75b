"""Take a ``Float8LinearConfig`` of the user's: what it means for plans, gathers and base dtypes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from lightning_lowprec.conversion.gains import Recipe
from lightning_lowprec.conversion.recipe_map import Gemm, InBF16


def kind_of(config: Any) -> tuple[Recipe, Literal["hybrid", "e4m3"]]:
    """Return the recipe that is nearest to a ``Float8LinearConfig``, and the format of its gradients.

    ``"tensorwise"`` has one scale per tensor everywhere; any scale per row makes the recipe rowwise.

    Raises:
        ValueError: ``config`` is of another type, or computes no GEMM in FP8.
    """
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import ScalingGranularity, ScalingType, e5m2_dtype

    if not isinstance(config, Float8LinearConfig):
        raise ValueError(f"`config={config!r}` is not valid; expected None or a torchao.float8.Float8LinearConfig.")
    gemms: tuple[Any, ...] = (
        config.cast_config_input,
        config.cast_config_grad_output,
        config.cast_config_input_for_grad_weight,
    )
    casts = (*gemms, config.cast_config_weight)
    high = [cast.scaling_type is ScalingType.DISABLED for cast in gemms]
    if all(high):
        raise ValueError("`config=Float8LinearConfig(...)` disables all three GEMMs, so nothing would run in FP8.")
    gradients: Literal["hybrid", "e4m3"]
    gradients = "hybrid" if config.cast_config_grad_output.target_dtype == e5m2_dtype else "e4m3"
    if all(cast.scaling_granularity is ScalingGranularity.TENSORWISE for cast in casts):
        return "tensorwise", gradients
    return "rowwise_with_gw_hp" if high[2] else "rowwise", gradients


def gather_refusal(config: Any) -> str | None:
    """Return why the weight cannot be gathered as float8: one of the GEMMs that read the weight is not in FP8."""
    from torchao.float8.config import ScalingType

    reads = (config.cast_config_weight, config.cast_config_weight_for_grad_input)
    if any(cast.scaling_type is ScalingType.DISABLED for cast in reads):
        return "`config` computes a GEMM that reads the weight in high precision"
    return None


def in_high_precision(config: Any) -> InBF16:
    """Return the products that a user's config computes in high precision."""
    from torchao.float8.config import ScalingType

    casts: dict[Gemm, Any] = {
        "forward": config.cast_config_input,
        "grad_input": config.cast_config_grad_output,
        "grad_weight": config.cast_config_input_for_grad_weight,
    }
    return frozenset(gemm for gemm, cast in casts.items() if cast.scaling_type is ScalingType.DISABLED)


def for_layers(config: Any, *, emulate: bool) -> Any:
    """Return the configuration for our layers, whose weights FSDP2 gathers by our code and not by torchao's."""
    return replace(config, emulate=emulate, enable_fsdp_float8_all_gather=False)
