"""Private names of torch (2.11 to 2.13) that say where in a file of ``torch.save`` a tensor lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor

from lightning_lowprec.private.names import missing

_NAMES: Final = ("torch._subclasses.fake_tensor.FakeTensorMode", "torch.serialization._load")


def moved() -> list[str]:
    """Return the private names that the installed torch no longer has."""
    return missing(_NAMES)


@contextmanager
def without_values() -> Iterator[None]:
    """Let ``torch.load`` make tensors without values, which know their place in the file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        yield


def place_of(tensor: Tensor) -> int | None:
    """Return the byte of the file at which the storage of a tensor begins; None: torch does not say."""
    storage: Any = tensor.untyped_storage()
    place: int | None = getattr(storage, "_checkpoint_offset", None)
    return place
