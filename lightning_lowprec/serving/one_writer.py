"""Rank 0 writes, and an error of rank 0 is raised on every rank.

A sharded model is read by all ranks together (:class:`OneWriter`). A model that every rank has is read by rank 0 alone;
other ranks that want it written too wait for the result (:func:`first_writes`).
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final, TypeVar, cast, final

import torch.distributed as dist
from torch import Tensor

from lightning_lowprec.checkpoints.agreement import on_all_ranks, rank_and_ranks
from lightning_lowprec.private.fsdp2 import default_store

T = TypeVar("T")
_WAIT: Final = timedelta(days=1)
_calls: Counter[str] = Counter()


def first_writes(name: str, action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and return its result, or raise its error, on every rank that calls this.

    This is no collective, because rank 0 may be the only rank that exports. The outcome goes through the store of the
    process group.

    Args:
        name: of what is written.
        action: writes; its result and its errors can be pickled.
    """
    rank, ranks = rank_and_ranks()
    if ranks == 1:
        return action()
    store = default_store()
    _calls[name] += 1
    key = f"lightning_lowprec/{name}/{_calls[name]}"
    if rank != 0:
        store.wait([key], _WAIT)
        result, failure = pickle.loads(store.get(key))
        if failure is not None:
            raise failure
        return cast(T, result)
    try:
        done = action()
    except Exception as error:
        store.set(key, pickle.dumps((None, type(error)(*error.args))))
        raise
    store.set(key, pickle.dumps((done, None)))
    return done


@final
class OneWriter:
    """The rank that writes.

    Args:
        is_shared: whether all ranks read together, and rank 0 writes; else this rank is alone, and writes.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared and dist.is_initialized()
        self._writes = not self._is_shared or dist.get_rank() == 0

    def run(self, action: Callable[[], T]) -> T | None:
        """Run ``action`` on the rank that writes, and return its result there; None elsewhere. An error is shared."""

        def mine() -> T | None:
            return action() if self._writes else None

        return on_all_ranks(mine) if self._is_shared else mine()

    def take(
        self, chunks: Iterable[tuple[str, Tensor]], write: Callable[[str, Tensor], None] | None, *, agree_after: int
    ) -> None:
        """Read all chunks, and hand each to ``write``.

        Reading a chunk is a collective of all ranks. So after an error of ``write`` its rank reads on without writing,
        until all ranks ask each other, and then all ranks raise.

        Args:
            chunks: the same names and shapes on every rank.
            write: on the rank that writes; None elsewhere.
            agree_after: the number of bytes after which the ranks ask each other.
        """
        failure: Exception | None = None
        left = agree_after
        for name, rows in chunks:
            if write is not None and failure is None:
                try:
                    write(name, rows)
                except Exception as error:
                    failure = error
            left -= rows.nbytes
            if left <= 0 or (failure is not None and not self._is_shared):
                self._agree(failure)
                left = agree_after
        self._agree(failure)

    def _agree(self, failure: Exception | None) -> None:
        def mine() -> None:
            if failure is not None:
                raise failure

        self.run(mine)
