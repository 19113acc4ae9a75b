"""NeMo's precision recipes under NeMo's names. Each returns a plugin of this package with NeMo's values.

    from lightning_lowprec import recipes

    trainer = L.Trainer(plugins=recipes.bf16_with_fp8_mixed(fp8_margin=2, keep=["lm_head"]))

Every recipe takes the arguments of NeMo's ``MegatronMixedPrecision``, and the options of the plugin that it returns. An
argument that has no equal here raises, with the reason.

The FP8 recipes run through Transformer Engine. With delayed and current scaling they set NeMo's ``fp8_params``, which
does not go with FSDP2.

The values are those of ``nemo.collections.llm.recipes.precision.mixed_precision`` (NeMo 2). One differs: NeMo sets
``autocast_enabled=False``, because Megatron's layers choose their float32 parts themselves. Other models need autocast
for softmax, norms and losses, so autocast stays on here. Under FSDP2 gradients are reduced in the dtype in which NeMo
reduces them: float32, or fp16 in the fp16 recipes. DDP runs with ``grad_reduce_in_fp32=False`` only.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from lightning_lowprec.other_stacks import NEMO
from lightning_lowprec.precision.half import HalfMixed
from lightning_lowprec.precision.loss_scale import LossScale
from lightning_lowprec.precision.options import BASE_DTYPES, Base
from lightning_lowprec.te.plugin import FP8TE


def bf16_mixed(**arguments: object) -> HalfMixed:
    """bf16 weights and compute, float32 masters, gradients accumulated in float32, and reduced so under FSDP2.

    18 bytes per parameter with AdamW: 2 (weight), 4 (gradient), 4 (master), 8 (moments).
    """
    return _half("bf16", arguments)


def fp16_mixed(**arguments: object) -> HalfMixed:
    """fp16 weights, gradients and compute, float32 masters, Megatron's loss scaling.

    16 bytes per parameter with AdamW. The scale starts at 2**32, so the first steps of a run are skipped until the
    scale fits: about 18 steps if gradients are around 1.
    """
    return _half("fp16", arguments)


def bf16_with_fp8_mixed(**arguments: object) -> FP8TE:
    """:func:`bf16_mixed` with hybrid delayed scaling: margin 0, the largest amax of 1024 steps."""
    return _fp8("bf16", "delayed", arguments, **_DELAYED)


def fp16_with_fp8_mixed(**arguments: object) -> FP8TE:
    """:func:`fp16_mixed` with hybrid delayed scaling: margin 0, the largest amax of 1024 steps."""
    return _fp8("fp16", "delayed", arguments, **_DELAYED)


def bf16_with_mxfp8_mixed(**arguments: object) -> FP8TE:
    """:func:`bf16_mixed` with MXFP8, hybrid as in NeMo (Blackwell)."""
    return _fp8("bf16", "mxfp8", arguments)


def fp16_with_mxfp8_mixed(**arguments: object) -> FP8TE:
    """:func:`fp16_mixed` with MXFP8, hybrid as in NeMo (Blackwell)."""
    return _fp8("fp16", "mxfp8", arguments)


def bf16_with_fp8_current_scaling_mixed(**arguments: object) -> FP8TE:
    """:func:`bf16_mixed` with hybrid current scaling, and the first and the last block in bf16."""
    return _fp8("bf16", "current", arguments, fp8_params=True, first_last_layers_bf16=True)


def fp16_with_fp8_current_scaling_mixed(**arguments: object) -> FP8TE:
    """:func:`fp16_mixed` with hybrid current scaling, and the first and the last block in fp16."""
    return _fp8("fp16", "current", arguments, fp8_params=True, first_last_layers_bf16=True)


def bf16_with_fp8_subchannel_scaling_mixed(**arguments: object) -> FP8TE:
    """:func:`bf16_mixed` with blockwise scaling, hybrid as in NeMo."""
    return _fp8("bf16", "block", arguments)


def fp16_with_fp8_subchannel_scaling_mixed(**arguments: object) -> FP8TE:
    """:func:`fp16_mixed` with blockwise scaling, hybrid as in NeMo."""
    return _fp8("fp16", "block", arguments)


def __getattr__(name: str) -> Any:
    from lightning_lowprec.other_stacks import RECIPES, pointer

    answer = pointer(name, RECIPES, NAMES)
    raise AttributeError(". ".join(filter(None, [f"module {__name__!r} has no attribute {name!r}", answer])))


NAMES: Final = tuple(name for name in globals() if name.endswith("_mixed"))
_DELAYED: Final = {"fp8_params": True, "margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}
_MEGATRON_SCALE: Final = LossScale(initial=2.0**32, floor=1.0, growth_interval=1000, hysteresis=2)
_SCALE_FIELDS: Final = {
    "fp16_initial_loss_scale": "initial",
    "fp16_min_loss_scale": "floor",
    "fp16_loss_scale_window": "growth_interval",
    "fp16_hysteresis": "hysteresis",
}
_FP8_OPTIONS: Final = {
    "fp8": "fp8_format",
    "fp8_margin": "margin",
    "fp8_amax_history_len": "amax_history_len",
    "fp8_amax_compute_algo": "amax_compute_algo",
    "fp8_dot_product_attention": "fp8_dpa",
    "fp8_multi_head_attention": "fp8_mha",
    "fp8_params": "fp8_params",
    "fp8_param_gather": "fp8_params",
}
_KINDS: Final = {"delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mxfp8"}
"""Our recipe for each value of NeMo's ``fp8_recipe``."""


def _half(base: Base, arguments: Mapping[str, Any]) -> HalfMixed:
    reduce_dtype, options = _common(base, arguments)
    for name in options.keys() & (_FP8_OPTIONS.keys() | {"fp8_recipe"}):
        raise ValueError(f"`{name}={options[name]!r}` goes with the FP8 recipes, such as `{base}_with_fp8_mixed`.")
    plugin = HalfMixed(base, **options)
    plugin.reduce_dtype = reduce_dtype
    return plugin


def _fp8(base: Base, kind: str, arguments: Mapping[str, Any], **values: object) -> FP8TE:
    reduce_dtype, options = _common(base, arguments)
    asked = options.pop("fp8_recipe", None)
    if asked is not None and _KINDS.get(asked) != kind:
        raise ValueError(
            f"`fp8_recipe={asked!r}` is not that of this recipe, which has {kind!r}; take the recipe of"
            " `lightning_lowprec.recipes` with the scaling that you want."
        )
    twice = {"fp8_params", "fp8_param_gather"} & options.keys()
    if len({options[name] for name in twice}) > 1:
        raise ValueError("`fp8_params` and `fp8_param_gather` are one option here; give them the same value.")
    own = {_FP8_OPTIONS.get(name, name): value for name, value in options.items()}
    plugin = FP8TE(kind, **{"base": base, "fp8_format": "hybrid", **values, **own})
    plugin.reduce_dtype = reduce_dtype
    return plugin


def _common(base: Base, arguments: Mapping[str, Any]) -> tuple[torch.dtype, dict[str, Any]]:
    others = {name: value for name, value in arguments.items() if (name, value) != ("fp8", None)}
    here = {
        "precision": ("bf16-mixed",) if base == "bf16" else ("16-mixed", "16"),
        "params_dtype": (BASE_DTYPES[base],),
        "pipeline_dtype": (None, BASE_DTYPES[base]),
        "autocast_dtype": (None, BASE_DTYPES[base]),
        "autocast_enabled": (True,),
        "fp8_wgrad": (True,),
    }
    for name in here.keys() & others.keys():
        value = others.pop(name)
        if value not in here[name]:
            allowed = " or ".join(map(repr, here[name]))
            answer = NEMO.get(name, "Take another recipe.")
            raise ValueError(f"`{name}={value!r}` is not possible in this recipe; expected {allowed}. {answer}")
    in_float32 = others.pop("grad_reduce_in_fp32", base == "bf16")
    if not isinstance(in_float32, bool):
        raise ValueError(f"`grad_reduce_in_fp32={in_float32!r}` is not valid; expected True or False.")
    dtype = torch.float32 if in_float32 else None
    options: dict[str, Any] = {"master_weights": True, "grad_accumulation_dtype": dtype}
    scale = {_SCALE_FIELDS[name]: others.pop(name) for name in _SCALE_FIELDS.keys() & others.keys()}
    static = others.pop("fp16_loss_scale", None)
    if base == "fp16":
        options["loss_scale"] = dataclasses.replace(_MEGATRON_SCALE, **scale) if static is None else static
    return dtype or BASE_DTYPES[base], {**options, **others}
