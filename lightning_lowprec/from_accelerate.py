"""Make plugins of Accelerate's ``TERecipeKwargs``, ``AORecipeKwargs`` and ``MSAMPRecipeKwargs``, with their values.

    L.Trainer(plugins=AORecipeKwargs(config=Float8LinearConfig(...)))

The objects are recognised by the names of their classes, so Accelerate is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from lightning_lowprec.msamp.plugin import MSAMP
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.te.plugin import FP8TE
from lightning_lowprec.torchao.fp8 import FP8TorchAO


def plugin_of(given: Any) -> LowPrecision | None:
    """Return the plugin that an object of Accelerate means, or None for any other object.

    Raises:
        ValueError: a value has no equal here.
        ImportError: the backend is not installed.
    """
    cls = type(given)
    make = _MAKERS.get(cls.__name__) if cls.__module__.partition(".")[0] == "accelerate" else None
    return None if make is None else make(given)


def _torchao(given: Any) -> LowPrecision:
    if given.module_filter_func is not None:
        raise ValueError(
            f"`AORecipeKwargs(module_filter_func={given.module_filter_func!r})` has no equal: layers are chosen by name"
            " here. Write `FP8TorchAO(config=..., keep=[...])` or `only=[...]`, with names of layers or patterns."
        )
    return FP8TorchAO(config=given.config)


def _te(given: Any) -> LowPrecision:
    evaluate = given.use_autocast_during_eval
    if given.use_mxfp8_block_scaling:  # Accelerate passes no other value to this recipe
        return FP8TE("mxfp8", fp8_eval=evaluate)
    fields = {name: getattr(given, name) for name in ("fp8_format", "margin", "amax_history_len", "amax_compute_algo")}
    of_1x = {"interval": 1, "override_linear_precision": (False, False, False)}  # FP8TE refuses other values
    fields |= {name: getattr(given, name) for name, default in of_1x.items() if getattr(given, name) != default}
    return FP8TE({"recipe": "delayed", **fields}, fp8_eval=evaluate)


def _msamp(given: Any) -> LowPrecision:
    return MSAMP(given.opt_level)


_MAKERS: Final[Mapping[str, Callable[[Any], LowPrecision]]] = {
    "AORecipeKwargs": _torchao,
    "TERecipeKwargs": _te,
    "MSAMPRecipeKwargs": _msamp,
}
