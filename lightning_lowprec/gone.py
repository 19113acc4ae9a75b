"""Words that have left this package, and what to write instead; docs/removed.md says why each has left.

One mapping answers each way in which a user can write such a word: a name for ``precision=``, an argument of a class,
a value of an argument, an import, a command and a flag of a command. Nothing of the old code stays for a word.
An answer is one or two sentences that name what to write; ``tests/test_gone.py`` runs what an answer names: quoted
names of precisions, calls and commands between backticks.
"""

from collections.abc import Mapping
from typing import Final

PRECISIONS: Final[Mapping[str, str]] = {}
"""Names for ``precision=``, without one of the suffixes that a family had; the answer names the word of today."""

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
    "threads": "Set the environment variable `OMP_NUM_THREADS`.",
}
"""Arguments of classes and functions, as they were spelled."""

VALUES: Final[Mapping[str, Mapping[str, str]]] = {}
"""For an argument that is still there: the values that have left, as they were spelled."""

IMPORTS: Final[Mapping[str, str]] = {}
"""Names of ``lightning_lowprec``, ``lightning_lowprec.callbacks`` and ``lightning_lowprec.msamp``."""

COMMANDS: Final[Mapping[str, str]] = {}
"""Commands of ``lowprec``."""

FLAGS: Final[Mapping[str, str]] = {"compare --threads": OPTIONS["threads"]}
"""Flags of commands that are still there, as ``"plan --copies"``; ``"--completion"`` is one of ``lowprec`` itself."""


def gone(name: str, answers: Mapping[str, str]) -> str:
    """Return the end of an error message for a word that has left, ``""`` for every other word."""
    answer = answers.get(name)
    return "" if answer is None else f"{name!r} has left the package. {answer}"


def missing_attribute(module: str, name: str) -> AttributeError:
    """Return the error for a name that a module of this package does not have."""
    words = [f"module {module!r} has no attribute {name!r}", gone(name, IMPORTS)]
    return AttributeError(". ".join(filter(None, words)))
