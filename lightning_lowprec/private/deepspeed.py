"""Private names of DeepSpeed, and of Lightning's strategy for it. DeepSpeed is imported inside the functions."""

from collections.abc import Callable
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from typing import Any, Final

import torch
from packaging.version import Version
from torch import Tensor, nn

from lightning_lowprec.extras import missing

OLDEST: Final = "0.19.8"
"""The oldest DeepSpeed that was run. Older ones cast buffers (rotary tables) to half precision too."""
_WHOLE_SHAPE: Final = "ds_shape"
"""Attribute of a parameter that ZeRO-3 has cut: the shape of the whole parameter."""
_MASTER: Final = "_hp_mapping"
"""Attribute of a half-precision parameter whose float32 master ZeRO-1 or ZeRO-2 has cut."""
_STATES: Final = "_optim_states.pt"
"""The end of the names of files with optimizer states: ``bf16_zero_pp_rank_0_...`` in bf16, ``zero_pp_rank_0_...``."""
_INITIALIZE: Final = "_setup_model_and_optimizer"
"""Method of the Trainer's DeepSpeedStrategy: gives model, optimizer and scheduler to ``deepspeed.initialize``."""


def moved() -> list[str]:
    """Return the private names that the installed DeepSpeed or Lightning no longer has; [] without DeepSpeed."""
    if find_spec("deepspeed") is None:
        return []
    return missing([f"lightning.pytorch.strategies.deepspeed.DeepSpeedStrategy.{_INITIALIZE}"])


def check() -> None:
    """Raise ImportError if this DeepSpeed is older than what was run, or if a private name has moved."""
    version = installed_version("deepspeed")
    if Version(version) < Version(OLDEST):
        raise ImportError(
            f"deepspeed {version} is older than {OLDEST}, the oldest that lightning_lowprec was run with:"
            f" `pip install 'deepspeed>={OLDEST}'`."
        )
    if lost := moved():
        raise ImportError(
            f"deepspeed {version} with this Lightning has moved {', '.join(lost)}, which lightning_lowprec uses."
            f" Install a supported version: `pip install 'deepspeed>={OLDEST},<0.20'`."
        )


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of a parameter, also where ZeRO-3 has cut the parameter over the ranks and left it empty."""
    shape: torch.Size = getattr(parameter, _WHOLE_SHAPE, parameter.shape)
    return shape


def refuse_zero(model: nn.Module, who: str, *, masters: bool = False) -> None:
    """Raise RuntimeError if ZeRO-3 has cut the weights of a model that the function ``who`` needs.

    With ``masters``, the function needs the float32 values too, which ZeRO-1 and ZeRO-2 cut.
    """
    marks = (_WHOLE_SHAPE, _MASTER) if masters else (_WHOLE_SHAPE,)
    if any(getattr(parameter, mark, None) is not None for parameter in model.parameters() for mark in marks):
        raise RuntimeError(
            f"{who} needs whole weights{' in float32' if masters else ''}, and DeepSpeed's ZeRO has cut them. Save a"
            " checkpoint, make a file of it by `python zero_to_fp32.py`, which lies in the checkpoint's folder, and"
            " load the file into a fresh model."
        )


def explain_loading(engine: Any, precision: str) -> None:
    """Let an engine say why a checkpoint of another base dtype does not load: its files have other names."""
    load = engine.load_checkpoint

    def explained(*args: object, **kwargs: object) -> object:
        try:
            return load(*args, **kwargs)
        except FileNotFoundError as error:
            if not str(error.filename).endswith(_STATES):
                raise
            raise FileNotFoundError(
                f"`precision={precision!r}`: there is no file {str(error.filename)!r}. DeepSpeed writes optimizer"
                " states under other names in bf16 than in fp16, so the checkpoint may be of the other base dtype."
                " Resume it with a precision of that dtype; or make a file of float32 weights by `python"
                " zero_to_fp32.py`, which lies in the checkpoint's folder, and load the file into a fresh model."
            ) from error

    engine.load_checkpoint = explained


def before_initialize(strategy: object, check: Callable[[object, object], None]) -> None:
    """Let a Trainer's DeepSpeedStrategy call ``check(model, optimizer)`` before ``deepspeed.initialize``."""
    initialize = getattr(strategy, _INITIALIZE)

    def checked(model: object, optimizer: object, *args: object, **kwargs: object) -> object:
        check(model, optimizer)
        return initialize(model, optimizer, *args, **kwargs)

    setattr(strategy, _INITIALIZE, checked)
