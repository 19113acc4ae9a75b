"""Words that have left this package, and what to write instead; docs/removed.md says why each has left.

One mapping answers each way in which a user can write such a word: a name for ``precision=``, an argument of a class,
a value of an argument, an import, a command and a flag of a command. Nothing of the old code stays for a word.
An answer is one or two sentences that name what to write; ``tests/test_gone.py`` runs what an answer names: quoted
names of precisions, calls and commands between backticks.
"""

from collections.abc import Mapping
from typing import Final

ENDINGS: Final = ("-remainder", "-8bit", "-sr")
"""The endings of formats of today."""
_ONE_NAME: Final = {
    "fp8-tensorwise": "fp8-hybrid",
    "fp8-hybrid-torchao": "fp8-hybrid",
    "fp8-e4m3-torchao": "fp8-e4m3",
    "fp8-block-torchao": "fp8-block",
    "mxfp8-torchao": "mxfp8",
    "fp8-current": "fp8-current-te",
}
"""Formats that had a second name, or whose name did not say that Transformer Engine computes."""
_FORMATS: Final = (
    *("fp8-hybrid", "fp8-e4m3", "fp8-rowwise", "fp8-rowwise-gw-hp", "fp8-block", "mxfp8", "int8-mixed"),
    *("fp8-hybrid-te", "fp8-e4m3-te", "fp8-current-te", "fp8-block-te"),
)
_IN_FP16: Final = {
    "fp8-e4m3": "FP8TorchAO(fp8_format='e4m3', base='fp16')",
    "int8-mixed": "Int8TorchAO(base='fp16')",
    "fp8-e4m3-te": "FP8TE(fp8_format='e4m3', base='fp16')",
    "fp8-current-te": "FP8TE('current', base='fp16')",
}
_NO_MASTER: Final = "Write '{0}-remainder': the same float32 masters in 2 bytes less. Under DeepSpeed write '{0}'."
_TWO_RUNS: Final = (
    "A checkpoint resumes under any precision: train with 'bf16-mixed' and `Trainer(max_steps=...)`, then with"
    " 'fp8-hybrid' and `trainer.fit(model, ckpt_path=...)`. For single products or layers in bf16 resume with"
    " `FP8TorchAO({'*': {'forward': 'bf16'}})` or `FP8TorchAO(keep=['blocks.0'])`."
)
_KEEP_BY_NAME: Final = (
    "`lowprec monitor lightning_logs --keep` prints the layers that FP8 serves worst: resume with"
    " `FP8TorchAO(keep=['blocks.0.up'])`."
)
_IN_THE_STEP: Final = "Weights are updated in the step, so that clipping and accumulation are those of every precision."
PRECISIONS: Final[Mapping[str, str]] = {
    **{f"{left}{end}": f"Write '{new}{end}'." for left, new in _ONE_NAME.items() for end in ("", *ENDINGS)},
    **{f"{name}-master": _NO_MASTER.format(_ONE_NAME.get(name, name)) for name in (*_ONE_NAME, *_FORMATS)},
    **{
        f"{name}-fp16": f"Write `{_IN_FP16[today]}` in `plugins=`."
        for name in (*_ONE_NAME, *_IN_FP16)
        if (today := _ONE_NAME.get(name, name)) in _IN_FP16
    },
    **dict.fromkeys(("fp8-tensorwise-fp16", "fp8-hybrid-torchao-fp16"), "Write 'fp8-hybrid-fp16'."),
    "nvfp4": "Write 'nvfp4-te', which says that Transformer Engine computes.",
    "bf16-lean": f"Write 'bf16-8bit': 8 bytes per parameter with its gradient. {_IN_THE_STEP}",
    "bf16-lean-sr": "Write 'bf16-sr', or `HalfMixed('bf16', master_weights=MasterConfig(form='stochastic',"
    f" moments='8bit'))`: 6 bytes per parameter with its gradient. {_IN_THE_STEP}",
    "fp8-lean": f"Write 'fp8-hybrid-8bit': 8 bytes per parameter with its gradient. {_IN_THE_STEP}",
    **dict.fromkeys(
        ("nvfp4-torchao", *(f"nvfp4-torchao{end}" for end in ("-master", *ENDINGS))),
        "Write 'nvfp4-te', NVIDIA's kernels for Blackwell, or 'fp8-hybrid'.",
    ),
}
"""Names for ``precision=``, with their endings; the answer names the word of today."""

OPTIONS: Final[Mapping[str, str]] = {
    "fuse": "Compile the blocks of the model, or write `te.LayerNormLinear` and `te.LayerNormMLP` into the model, which"
    " `FP8TE()` runs in FP8. For experts in FP8 use 'fp8-hybrid'.",
    "ladder": "A bad layer goes to bf16 at once. For a scale per row write the recipe of the layer:"
    " `FP8TorchAO({'*.o_proj': 'rowwise', '*': 'tensorwise'})`.",
    "on_readings": "Read `monitor.readings` after a step, or the Trainer's loggers.",
    "bucket_bytes": "A step that no kernel does loads 256 MB of float32 masters at a time. Leave the option out.",
    "clip_last_norm": "Clip all gradients by `Trainer(gradient_clip_val=1.0)`.",
    "trace_nonfinite": "Repeat the run with `Trainer(detect_anomaly=True)` and `NumericsMonitor(every=1)`.",
    "shadow_loss": "Run `trainer.validate` with 'bf16-mixed' too, or `lowprec compare`.",
    "fp8_group": "All ranks share the scales of delayed scaling. Leave the option out.",
    "fp8_reduce": "Gradients are reduced in float32, or with `FSDP2Strategy(reduce_dtype=torch.bfloat16)` in bf16.",
    "grad_reduce_dtype": "`FSDP2Strategy()` reduces gradients in float32.",
    "config": "Write torchao's name of the recipe, `FP8TorchAO('rowwise')`, gradients in e4m3 as"
    " `FP8TorchAO(fp8_format='e4m3')`, and products in high precision as `FP8TorchAO({'*': {'grad_weight': 'bf16'}})`.",
    "rowwise_backward": "Scales of rows follow the product of codes, as in torchao. Leave the option out.",
    "weight_cache": "Write `FP8TE(fp8_params=True)`: weights are quantised once per optimizer step.",
    "update": f"Leave the option out. {_IN_THE_STEP}",
    "clip_tensor": "Clip all gradients by `Trainer(gradient_clip_val=1.0)` or `fabric.clip_gradients`.",
    "int8_eval": "Write `Int8TorchAO(fp8_eval=False)`, as for every format.",
    "z_loss": "Add it in your model, of the logits of some tokens: `z * logits.logsumexp(-1).square().mean()`.",
    "stochastic_rounding": "Leave the option out: codes are rounded to the nearest. 'fp8-hybrid-sr' rounds"
    " updates stochastically.",
    "saved_inputs": "Compiled blocks keep the float8 codes of their inputs without it. Leave the option out.",
    "weight_scales": "Weights of MXFP8 have a scale per 32 x 32 values. Leave the option out.",
    "accumulation": "Sums of a GPU are those of `FP8TorchAO(emulate='hopper')`: compare the losses of two runs, the"
    " other with `FP8TorchAO(emulate='hopper', fast_accum='none')`.",
    "monitor": "Train with `Trainer(callbacks=[NumericsMonitor()])`, then run `lowprec monitor lightning_logs`.",
    "threads": "Set the environment variable `OMP_NUM_THREADS`.",
    "min_gain": "`lowprec plan` shows which layers are too small to gain. Keep them in bf16 by name:"
    " `FP8TorchAO(keep=['*.k_proj', '*.v_proj'])`.",
    "schedule": _TWO_RUNS,
    "demote": _KEEP_BY_NAME,
    "tokens": "Gains are shown for 16384 tokens per step, as published. Leave the option out.",
}
"""Arguments of classes and functions, as they were spelled."""

_PLAIN: Final = "Plain weights are `torch.load('last.ckpt', weights_only=True)['state_dict']`."
WITHOUT_FORMAT: Final = f"Write a folder for servers, `--format hf`. {_PLAIN}"
"""For ``lowprec export`` without ``--format``, which wrote plain weights."""
_MI300: Final = "Write `FP8TorchAO(emulate=True)`: codes and scales as on a GPU of NVIDIA, products in float32."
VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "recipe": {
        "promoted": "Write `FP8TorchAO(fast_accum='none')`, for all products of the forward and the backward.",
        "fast": "Write `FP8TorchAO(fast_accum='all')`, for all products of the forward and the backward.",
        "CustomRecipe": "Use a recipe by name: `FP8TE('current')`, or `FP8TorchAO()` for other formats.",
        "{pattern: recipe}": "Transformer Engine has one recipe for all layers. Keep layers in bf16 by"
        " `FP8TE('current', keep=['*.o_proj'])`, or give layers recipes in `FP8TorchAO({'*.o_proj': 'rowwise',"
        " '*': 'tensorwise'})`.",
    },
    "format": {"torchao": "Write `format='compressed-tensors'`: the same codes and scales, read by the same servers."},
    "dtype": {"keep": WITHOUT_FORMAT},
    "emulate": {"mi300": _MI300},
    "LOWPREC_EMULATE": {"mi300": _MI300},
    "form": {"remainder8": "Write `MasterConfig(form='remainder')`: the exact masters in 2 bytes per parameter."},
}
"""For an argument, or variable of the environment, that is still there: values that have left, as they were spelled."""

_CHECK: Final = (
    "Compare the exported folder with the checkpoint, per token:"
    " `lowprec export last.ckpt served --format compressed-tensors --model llama --precision fp8-rowwise --check`."
)
IMPORTS: Final[Mapping[str, str]] = {
    "LowPrecisionEval": _CHECK,
    "PrecisionSchedule": _TWO_RUNS,
    "Demotion": _KEEP_BY_NAME,
    "ScaledSGD": "Use `lightning_lowprec.msamp.ScaledAdamW`, or 'fp8-hybrid', which takes every optimizer.",
    "BlockTorchAO": "Write `FP8TorchAO('block')`.",
    "MXFP8TorchAO": "Write `FP8TorchAO('mxfp8')`.",
    "prepare_for_ddp": "Train by `Trainer(strategy='ddp')` or `Fabric(strategy='ddp')`, which send the codes.",
    "NVFP4TorchAO": "Write 'nvfp4-te', NVIDIA's kernels for Blackwell, or 'fp8-hybrid'.",
}
"""Names of ``lightning_lowprec`` and its modules ``callbacks``, ``msamp`` and ``msamp.ddp``."""

COMMANDS: Final[Mapping[str, str]] = {"parity": _CHECK}
"""Commands of ``lowprec``."""

BARE_PRECISIONS: Final = "Give names, with `--fits`. The table of number formats is in docs/names.md"
"""For ``lowprec plan --precisions`` without a value."""
_MIN_GAIN: Final = "Keep layers in bf16 by name: `lowprec plan llama --keep '*.k_proj' '*.v_proj'`."
FLAGS: Final[Mapping[str, str]] = {
    "compare --schedule": f"Compare whole runs. {_TWO_RUNS}",
    "compare --threads": OPTIONS["threads"],
    "compare --monitor": OPTIONS["monitor"],
    "doctor --all": "`lowprec doctor --device sm_120` prints what runs on an architecture, with reasons and sources.",
    "doctor --report": "Paste what `lowprec doctor` prints.",
    "plan --markdown": "`lowprec plan llama > plan.txt` writes the plan to a file.",
    "plan --min_gain": _MIN_GAIN,
    "plan --tokens": OPTIONS["tokens"],
    "export --force": f"Name a new folder. {_PLAIN}",
    "export --min_gain": "Write the layers that the run kept: `--keep '*.k_proj'`.",
    "export --tokens": OPTIONS["tokens"],
    "plan --copies": "`lowprec plan llama --shards 8` shows one copy; docs/fsdp2.md has what copies send.",
    "monitor --top": "`lowprec monitor lightning_logs --json` prints every layer.",
    "--completion": "`lowprec plan --help` shows the options of a command.",
}
"""Flags of commands that are still there, as ``"plan --copies"``; ``"--completion"`` is one of ``lowprec`` itself."""


def gone(name: str, answers: Mapping[str, str]) -> str:
    """Return the end of an error message for a word that has left, ``""`` for every other word."""
    answer = answers.get(name)
    return "" if answer is None else f"{name!r} has left the package. {answer}"


def missing_attribute(module: str, name: str) -> Exception:
    """Return the error for a name that a module lacks; ``from ... import`` shows the words of an ImportError alone."""
    if answer := gone(name, IMPORTS):
        return ImportError(answer)
    return AttributeError(f"module {module!r} has no attribute {name!r}")
