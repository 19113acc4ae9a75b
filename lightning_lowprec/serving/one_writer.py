"""Rank 0 writes what all ranks read together: an error of rank 0 is raised on every rank, and no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, final

import torch.distributed as dist
from torch import Tensor

from lightning_lowprec.fsdp2.agreement import on_all_ranks

T = TypeVar("T")


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
