"""Adapters of PEFT that are merged into weights: PEFT writes through ``weight.data``, which changes no version."""

from __future__ import annotations

from typing import Any

from torch import nn


def merged_adapters(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return, for every layer of ``model`` that PEFT has wrapped, the list in which PEFT keeps what is merged.

    PEFT changes the list at each ``merge`` and ``unmerge``. ``merge_and_unload`` drops the wrapper and the list.
    """
    found: dict[nn.Module, list[str]] = {}
    for module in model.modules():
        wrapper: Any = module
        merged = getattr(wrapper, "merged_adapters", None)
        if isinstance(merged, list) and hasattr(wrapper, "get_base_layer"):
            found[wrapper.get_base_layer()] = merged
    return found
