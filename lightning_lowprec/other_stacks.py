"""Words of other stacks, in lower case with ``-`` for ``_``, and answers: sentences that end an error message."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final, NoReturn

from lightning_lowprec.gone import OPTIONS as GONE_OPTIONS
from lightning_lowprec.gone import gone

_HALF: Final = (
    "Write '{}-mixed' (float32 weights, as in torch and Accelerate) or '{}-master' (half weights with float32 masters,"
    " as in NeMo and DeepSpeed)."
)
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "Write 'fp8-hybrid': FP8 linear layers by torchao, bf16 elsewhere.": (
        *("fp8", "float8", "fp8-mixed", "fp8-true", "fp8: true", "8", "8-mixed", "hybrid"),
        *("fp8-auto", "bf16-fp8", "fp8-bf16"),
        *("ao", "torchao", "fp8-torchao", "fp8-ao", "tensorwise", "float8-tensorwise"),
    ),
    "Write 'fp8-hybrid-te': Transformer Engine with delayed scaling.": (
        *("delayed", "fp8-delayed", "te", "fp8-te", "transformer engine"),
    ),
    "Write 'fp8-hybrid-remainder': bf16 weights, FP8 linear layers.": ("fp8-remainder", "fp8-master"),
    "Write 'fp8-hybrid-8bit': bf16 weights, moments of 8 bits, FP8 linear layers.": ("fp8-8bit",),
    "Write 'fp8-hybrid-sr': bf16 weights, FP8 linear layers.": ("fp8-sr", "fp8-stochastic"),
    "Write 'fp8-rowwise'.": ("rowwise", "float8-rowwise"),
    "Write 'fp8-rowwise-gw-hp'.": ("rowwise-with-gw-hp",),
    "Write 'fp8-current-te'.": ("current", "current-scaling"),
    "Write 'fp8-block'.": ("block", "blockwise", "subchannel"),
    "Write 'int8-mixed'.": ("int8", "int8-true", "int8-mixed-precision-training"),
    "Write 'fp8-e4m3'.": ("e4m3",),
    _HALF.format("16", "fp16"): ("fp16-mixed", "fp16", "float16", "torch.float16", "fp16: true", "amp"),
    _HALF.format("bf16", "bf16"): ("bfloat16", "torch.bfloat16", "bfloat16-mixed", "bf16: true"),
    "Write `plugins=HalfEval('bf16')`, which trains in float32 and evaluates in bf16, as Axolotl does. For bf16 weights"
    " write 'bf16-remainder'.": ("bf16: full", "bf16:full", "bf16-full", "full"),
    "Write 'nvfp4-te': products in 4 bits by Transformer Engine.": ("fp4", "nvfp4-mixed", "bf16-with-nvfp4-mixed"),
    "Write 'half-auto': bf16 where the device has bf16, else fp16 with loss scaling.": (
        *("auto", "bf16: auto", "bf16:auto", "bf16-auto", "bf16 auto", "half"),
    ),
    "Write 'msamp-o1' for MS-AMP's level, or '16-mixed' for apex's.": ("o1", "msamp: o1"),
    "Write 'msamp-o2' for MS-AMP's level, or 'fp16-master' for apex's.": ("o2", "msamp: o2"),
    "Write 'msamp-o3' for MS-AMP's level, or '16-true' for apex's.": ("o3", "msamp: o3"),
    "Write 'msamp-o2', or 'msamp-o1', 'msamp-o3': the level is part of the name.": ("msamp", "ms-amp"),
    "Write 'bf16-8bit', or 'bf16-remainder' and keep `FlashAdamW`, which gets no masters of ours.": (
        *("bf16-flash", "flash"),
    ),
    "Write 'fp16-master'.": ("fp16-flash",),
    "Write '32-true'.": ("no", "fp32", "float32", "torch.float32", "fp32-true", "none"),
}
PRECISIONS: Final = {word: answer for answer, words in _WORDS.items() for word in words}
"""Words for ``precision=``, except the names of this package and of Lightning."""

_RECIPE: Final = "Write `plugins=lightning_lowprec.recipes.{}`."
_TWO_BLOCKS: Final = "num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=2"
RECIPES: Final[Mapping[str, str]] = {
    "bf16-with-fp8-delayed-scaling-mixed": _RECIPE.format("bf16_with_fp8_mixed()"),
    "fp16-with-fp8-delayed-scaling-mixed": _RECIPE.format("fp16_with_fp8_mixed()"),
    "nemotron-h-bf16-with-fp8-current-scaling-mixed": _RECIPE.format(
        f"bf16_with_fp8_current_scaling_mixed({_TWO_BLOCKS})"
    ),
    "nanov2-bf16-with-fp8-current-scaling-mixed": _RECIPE.format(
        f"bf16_with_fp8_subchannel_scaling_mixed(first_last_layers_bf16=True, {_TWO_BLOCKS})"
    ),
    **{
        f"nemotron-3-{model}-bf16-with-nvfp4-mixed": "Write `plugins=FP8TE('nvfp4', master_weights=True,"
        f" first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16={last})`."
        for model, last in (("super", 14), ("ultra", 16))
    },
    **{word: answer for word, answer in PRECISIONS.items() if "-with-" in word},
}
"""Recipes of Megatron-Bridge that NeMo 2 did not have."""

NEMO: Final[Mapping[str, str]] = {
    "params_dtype": "The dtype of the weights follows from `dtype` or `base`, and `master_weights`.",
    "pipeline_dtype": "There is no pipeline parallelism here.",
    "autocast_dtype": "Autocast has the dtype of `dtype` or `base`.",
    "autocast_enabled": "Leave it out: autocast is always on, so that softmax, norms and losses of any model run in"
    " float32.",
    "grad_reduce_in_fp32": "Leave False out, the default of `HalfMixed`; in a recipe write"
    " `recipes.bf16_mixed(grad_reduce_in_fp32=False)`. For True with half weights write `master_weights=True,"
    " grad_accumulation_dtype=torch.float32`, with `strategy='fsdp2'` on several GPUs.",
    "fp8": "Write `fp8_format='hybrid'` or `fp8_format='e4m3'` of `FP8TE`.",
    "fp8_recipe": "Write the recipe as the first argument: `FP8TE('delayed')`, 'current', 'block', 'mxfp8', 'nvfp4'.",
    "first_last_layers_bf16": "Write `first_last_layers_bf16=` of `FP8TE` or `FP8TorchAO`.",
    "num_layers_at_start_in_bf16": "Write `num_layers_at_start_in_bf16=` of `FP8TE` or `FP8TorchAO`.",
    "num_layers_at_end_in_bf16": "Write `num_layers_at_end_in_bf16=` of `FP8TE` or `FP8TorchAO`.",
    "fp8_margin": "Write `margin=` of `FP8TE`.",
    "fp8_amax_history_len": "Write `amax_history_len=` of `FP8TE`.",
    "fp8_amax_compute_algo": "Write `amax_compute_algo=` of `FP8TE`.",
    "fp8_wgrad": "For weight gradients in high precision write `FP8TorchAO('rowwise_with_gw_hp')`, or"
    " `FP8TE({'recipe': 'current', 'backward_override': 'high_precision'})` for both backward GEMMs.",
    "fp8_dot_product_attention": "Write `fp8_dpa=` of `FP8TE`.",
    "fp8_multi_head_attention": "Write `fp8_mha=` of `FP8TE`.",
    "fp8_params": "Write `fp8_params=` of `FP8TE`.",
    "fp8_param_gather": "Write `fp8_params=` of `FP8TE`; under 'fsdp2' write `FSDP2Strategy(fp8_all_gather=True)`.",
    "fp16_loss_scale": "Write `loss_scale=`, a number.",
    "fp16_initial_loss_scale": "Write `loss_scale=LossScale(initial=...)`.",
    "fp16_min_loss_scale": "Write `loss_scale=LossScale(floor=...)`.",
    "fp16_loss_scale_window": "Write `loss_scale=LossScale(growth_interval=...)`.",
    "fp16_hysteresis": "Write `loss_scale=LossScale(hysteresis=...)`.",
}
"""Arguments of NeMo's ``MegatronMixedPrecision``, which NeMo users also set as attributes of the plugin."""

_NVFP4: Final = "Write `FP8TE('nvfp4')`."
_STATE: Final = (
    "Write `master_weights=`: True (float32), 'remainder' (the same values in 2 bytes), or '8bit' (moments of 8 bits"
    " too)."
)
_MEGATRON: Final[Mapping[str, str]] = {
    "bf16": "Write `HalfMixed('bf16', master_weights=True)`, or `precision='bf16-master'`.",
    "fp16": "Write `HalfMixed('fp16', master_weights=True)`, or `precision='fp16-master'`.",
    "accumulate-allreduce-grads-in-fp32": "Write `master_weights=True, grad_accumulation_dtype=torch.float32`, with"
    " `strategy='fsdp2'` on several GPUs.",
    "grad-reduce-in-bf16": "Leave it out: gradients of half weights are sent as they are.",
    **{name[5:].replace("_", "-"): answer for name, answer in NEMO.items() if name.startswith("fp16_")},
    "fp8-param": NEMO["fp8_params"],
    "no-fp8-wgrad": NEMO["fp8_wgrad"],
    "transformer-impl": "Write the class of the plugin: `FP8TE` or `FP8TorchAO`.",
    "fp8-quantizer-factory": "Write a recipe by name: `FP8TE('current')`.",
    "reuse-grad-buf-for-mxfp8-param-ag": "Leave it out: no gather takes the memory of gradients.",
    **dict.fromkeys(("fp4", "fp4-format", "fp4-recipe", "fp4-param", "fp4-param-gather"), _NVFP4),
    **dict.fromkeys(("main-params-dtype", "main-grads-dtype", "exp-avg-dtype", "exp-avg-sq-dtype"), _STATE),
    **dict.fromkeys(("use-precision-aware-optimizer", "store-param-remainders"), _STATE),
}
"""Flags of Megatron's command line, and fields of Megatron-Bridge's ``MixedPrecisionConfig``."""

OPTIONS: Final[Mapping[str, str]] = {
    **_MEGATRON,
    "fp8-config": "Write the keys of Accelerate's block as options of `FP8TE` or `FP8TorchAO`; `backend` is the class.",
    "use-mxfp8-block-scaling": "Write `FP8TE('mxfp8')`.",
    "opt-level": "Write `level=` of `MSAMP`, e.g. `MSAMP('O2')`, or `precision='msamp-o2'`.",
    **{name.replace("_", "-"): answer for name, answer in NEMO.items()},
    "master-weight-bits": "It is an option of FlashOptim's optimizers. For masters of ours write"
    " `master_weights='remainder'` (32 bits) or `master_weights='8bit'` (32 bits, and moments of 8 bits).",
    "backend": "The class is the backend: `FP8TE`, `FP8TorchAO` or `MSAMP`.",
    "use-te": "Leave it out, or write 'fp8-hybrid-te-8bit' in place of MS-AMP's level: products by Transformer Engine,"
    " bf16 weights with exact masters, moments of 8 bits.",
    **dict.fromkeys(("interval", "fp8-interval"), "Leave it out: Transformer Engine computes scales in every step."),
    "pad-inner-dim": "Leave it out: `MSAMP` pads by itself, `FP8TE` keeps such layers in bf16, `FP8TorchAO` has it.",
    "override-linear-precision": "For both backward products in high precision write"
    " `FP8TE({'recipe': 'current', 'backward_override': 'high_precision'})`, for one product"
    " `FP8TorchAO({'*': {'grad_weight': 'bf16'}})`.",
    "use-autocast-during-eval": "Write `fp8_eval=` of `FP8TE` or `FP8TorchAO`.",
    "init-scale": "Write `initial=`.",
    "offload-params": "Write `cpu_offload=`.",
    "cpu-ram-efficient-loading": "Write `sync_module_states=True`, which sends the weights of rank 0 to all ranks.",
    "auto-wrap-policy": "Write `wrap=`: 'auto', the default, finds the repeated blocks; else classes or a function.",
    "transformer-layer-cls-to-wrap": "Write the class itself, in a list, as `wrap=`; 'auto', the default, finds the"
    " repeated blocks.",
    "sharding-strategy": "Weights are sharded by default. `reshard_after_forward=False` keeps gathered weights until"
    " the backward pass, as SHARD_GRAD_OP does, and `replicate='nodes'` shards within a node, as HYBRID_SHARD does.",
    "mixed-precision": "The precision says it; `param_dtype=`, `reduce_dtype=` and `buffer_dtype=` change one dtype.",
    "activation-checkpointing-policy": "Write `activation_checkpointing=`: True, classes or a function.",
}
"""Names of options of other stacks; `gone.py` has those that this package had."""


def nearest(word: object, choices: Iterable[object]) -> str | None:
    """Return the choice that is spelled most like ``word``, or None if no choice is near."""
    by_spelling = {_spelling(choice): str(choice) for choice in choices}
    found = difflib.get_close_matches(_spelling(word), by_spelling, n=1, cutoff=0.6)
    parts = _spelling(word).split("-")  # FULL_STATE_DICT is 'full'
    found = found or [spelling for spelling in by_spelling if spelling.isalpha() and spelling in parts]
    return by_spelling[found[0]] if found else None


def pointer(word: object, answers: Mapping[str, str], choices: Iterable[object]) -> str:
    """Return the answer to a word of another stack, else the nearest of ``choices`` as a question; "" without one."""
    if (answer := answers.get(_spelling(word))) is not None:
        return answer
    near = nearest(word, choices) if isinstance(word, str) else None
    return "" if near is None else f"Did you mean {near!r}?"


def unknown_option(function: str, name: str, allowed: Iterable[str]) -> TypeError:
    """Return the error for an argument that a function does not have: Python's words, and what to write instead."""
    message = f"{function}() got an unexpected keyword argument {name!r}"
    hint = gone(name, GONE_OPTIONS) or pointer(name, OPTIONS, allowed)
    return TypeError(". ".join(filter(None, [message, hint])))


def _spelling(word: object) -> str:
    return str(word).strip().lower().replace("_", "-")


def refuse_foreign(cls: type, answers: Mapping[str, str]) -> None:
    """Let reading a name of ``answers`` that ``cls`` lacks fail as usual, and setting it raise with the answer."""
    for name, answer in answers.items():
        if not hasattr(cls, name):
            setattr(cls, name, _foreign(name, answer))


def _foreign(name: str, answer: str) -> property:
    def read(instance: object) -> NoReturn:
        raise AttributeError(f"plugins of lightning_lowprec have no attribute {name!r}. {answer}")

    def write(instance: object, value: object) -> NoReturn:
        raise AttributeError(
            f"`{name}={value!r}` cannot be set on a {type(instance).__name__}: the attribute is that of NeMo's plugin,"
            f" and would do nothing here. {answer}"
        )

    return property(read, write)
