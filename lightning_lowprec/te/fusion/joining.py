"""Several weights as one, for a single GEMM, without keeping the copy until the backward.

Query, key and value (gate and up) are Parameters of their own and stay so; one GEMM wants one weight. Joined anew at
each forward, their gradients reach each of them. Autograd would keep the joined copy from forward to backward, 4 bytes
per weight of the whole model: it is told to keep the Parameters, which are there anyway, and to join them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_JOIN_AGAIN = object()


def join(parts: Sequence[Tensor]) -> Tensor:
    """[N0, ...], [N1, ...], ... -> [N0 + N1 + ..., ...]; a single part is itself."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def save_parts(output: Tensor, joined: Tensor, parts: Sequence[Tensor]) -> None:
    """Make the autograd function that computed ``output`` keep ``parts`` for its backward instead of ``joined``.

    Where someone else looks after saved tensors already (activation checkpointing, offloading), nothing is changed.

    Args:
        output: what a ``torch.autograd.Function`` has just returned.
        joined: the result of ``join(parts)`` that it was given.
        parts: the Parameters; changing them in place before the backward raises, as it does for any saved tensor.
    """
    node = output.grad_fn
    if node is None or len(parts) == 1:
        return
    place = (joined.data_ptr(), joined.shape, joined.dtype)
    versions = [part._version for part in parts]

    def pack(saved: Tensor) -> object:
        return _JOIN_AGAIN if (saved.data_ptr(), saved.shape, saved.dtype) == place else saved

    def unpack(packed: object) -> object:
        if packed is not _JOIN_AGAIN:
            return packed
        if versions != [part._version for part in parts]:
            raise RuntimeError(
                "A weight of a fused layer was changed in place between forward and backward (by an optimizer step?):"
                " its gradient would be that of another weight. Run the backward first."
            )
        return join([part.detach() for part in parts])

    for saved in getattr(node, "_raw_saved_tensors", ()):
        try:
            saved.register_hooks(pack, unpack)
        except RuntimeError:  # a None, or hooks are set already
            continue
    # Transformer Engine's functions keep the weight as an attribute, too
    for name, value in list(getattr(node, "__dict__", {}).items()):
        if value is joined:
            setattr(node, name, None)
