"""Two backends can stand behind ``fp8-hybrid`` and its kin: all ranks, and a resumed run, must mean the same one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist

PINNED: Final = {"transformer_engine": "-te", "torchao": "-torchao"}
"""By backend: the end of the names that mean it wherever they run."""


def check_ranks_agree(precision: str, backend: str) -> None:
    """Raise RuntimeError if ``precision`` means another backend on another rank; every rank calls it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, backend)
    if len(set(found)) > 1:
        ranks = {name: [rank for rank, other in enumerate(found) if other == name] for name in dict.fromkeys(found)}
        said = " and ".join(f"{name} on ranks {', '.join(map(str, ranks[name]))}" for name in ranks)
        raise RuntimeError(
            f"`precision={precision!r}` means {said}, since they have different GPUs or packages. Say which:"
            f" {_pinned(precision)}."
        )


def check_resumes(precision: str, backend: str, state: Mapping[str, Any]) -> None:
    """Raise RuntimeError if the checkpoint of a plugin's ``state`` was trained by the other backend."""
    stored = state.get("backend", backend)
    if stored != backend:
        raise RuntimeError(
            f"The checkpoint was trained by {stored}, and here `precision={precision!r}` means {backend}. To go on with"
            f" {stored}, use {_pinned(precision, stored)}; to change over, {_pinned(precision, backend)}."
        )


def _pinned(precision: str, backend: str | None = None) -> str:
    stem, fp16 = precision.removesuffix("-fp16"), "-fp16" if precision.endswith("-fp16") else ""
    endings = PINNED.values() if backend is None else [PINNED[backend]]
    return " or ".join(f"'{stem}{ending}{fp16}'" for ending in endings)
