"""The names of tensors in published checkpoints of transformers, which are not always those of the model (5.0 and on).

A mixture's stacked experts are published as one Linear per expert, for example. The functions used have no underscore,
but no documentation either; transformers 4 publishes the model's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from lightning_lowprec.private.names import missing
from lightning_lowprec.private.transformers import is_model

_LOADING: Final = "transformers.core_model_loading"
_NAMES: Final = (
    f"{_LOADING}.revert_weight_conversion",
    f"{_LOADING}.apply_converters",
    f"{_LOADING}.WeightConverter.reverse_transform",
    f"{_LOADING}.PrefixChange",
    "transformers.conversion_mapping.get_model_conversion_mapping",
)


class Group(NamedTuple):
    """Tensors of a model that become tensors of a published checkpoint together."""

    names: tuple[str, ...]
    """In the model."""
    is_renamed: bool
    """Whether there is one tensor, whose values stay."""


def moved() -> list[str]:
    """Return the names that the installed transformers no longer has; [] without transformers 5."""
    return missing(_NAMES) if _converts() else []


def _converts() -> bool:
    return find_spec("transformers") is not None and find_spec(_LOADING) is not None


def groups(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """Return which tensors are published together, in the order of ``names``."""
    converters = _converters(model)
    found: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        key, is_renamed = name, True
        if converters:
            from transformers.core_model_loading import apply_converters

            target, pattern = apply_converters(name, converters)
            key, is_renamed = (name, True) if pattern is None else (target, False)
        found.setdefault((key, is_renamed), []).append(name)
    return [Group(tuple(members), is_renamed) for (_, is_renamed), members in found.items()]


def published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one group as they are published; on the meta device too."""
    if not is_model(model) or not _converts():
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    found: Any = revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
    return dict(found)


def _converters(model: Any) -> list[Any]:
    """Return the conversions of several tensors, or of their values, from a model to a published checkpoint."""
    if not is_model(model) or not _converts():
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter

    given = getattr(model, "_weight_conversions", None)  # of `from_pretrained`
    if given is None:
        given = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    reversed_ones = (conversion.reverse_transform() for conversion in reversed(given))
    return [conversion for conversion in reversed_ones if isinstance(conversion, WeightConverter)]
