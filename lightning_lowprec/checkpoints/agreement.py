"""Let all ranks of the default process group have one outcome: all return, or all raise."""

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, Final, TypeVar, cast

from torch import distributed as dist

T = TypeVar("T")
KEPT_CLASSES: Final = (FileNotFoundError, OSError, UnpicklingError, ValueError)
"""Exceptions that keep their class on the ranks where they did not happen; others become a RuntimeError there."""


def rank_and_ranks() -> tuple[int, int]:
    """Return this rank, and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gathered(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0, and return its result or raise its error on all ranks."""
    outcome: list[Any] = [None, None]
    if rank_and_ranks()[0] == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    value, failure = outcome
    if failure is not None:
        raise failure
    return cast(T, value)


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run ``action`` on every rank, and return this rank's result; if one rank raises, all ranks raise."""
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    kept = next((kind for kind in KEPT_CLASSES if isinstance(failure, kind)), RuntimeError)
    failures = gathered(None if failure is None else (kept, f"{failure}" or type(failure).__name__))
    if failure is not None:
        raise failure
    for rank, other in enumerate(failures):
        if other is not None:
            raise other[0](f"rank {rank}: {other[1]}")
    return result
