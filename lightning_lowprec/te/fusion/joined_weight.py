"""Join several weights for a single GEMM, without keeping the joined copy from forward to backward.

Query, key and value (gate and up) stay separate Parameters, but one GEMM takes one weight. The weights are joined anew
at each forward, so that every Parameter gets its gradient. Autograd would keep the joined copy for the backward: 4
bytes per weight of the whole model. Instead it keeps the Parameters, which exist anyway, and joins them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowprec.private.torch import saved_tensors, version_of

_JOIN_AGAIN = object()


def join_weights(parts: Sequence[Tensor]) -> Tensor:
    """[N0, ...], [N1, ...], ... -> [N0 + N1 + ..., ...]; a single part is returned unchanged."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def save_parts(output: Tensor, joined: Tensor, parts: Sequence[Tensor]) -> None:
    """Make the autograd function that computed ``output`` from ``joined`` keep ``parts`` for its backward instead.

    To change the parts in place before the backward raises, as for any saved tensor. Nothing is changed where other
    hooks handle the saved tensors already (activation checkpointing, offloading).
    """
    node = output.grad_fn
    if node is None or len(parts) == 1:
        return
    place = (joined.data_ptr(), joined.shape, joined.dtype)
    versions = [version_of(part) for part in parts]

    def pack(saved: Tensor) -> object:
        return _JOIN_AGAIN if (saved.data_ptr(), saved.shape, saved.dtype) == place else saved

    def unpack(packed: object) -> object:
        if packed is not _JOIN_AGAIN:
            return packed
        if versions != [version_of(part) for part in parts]:
            raise RuntimeError(
                "A weight of a fused layer was changed in place between forward and backward (by an optimizer step?):"
                " its gradient would be that of another weight. Run the backward first."
            )
        return join_weights([part.detach() for part in parts])

    for saved in saved_tensors(node):
        try:
            saved.register_hooks(pack, unpack)
        except RuntimeError:  # a None, or hooks are set already
            continue
    # Transformer Engine's functions keep the weight as an attribute of the node, too
    for name, value in list(getattr(node, "__dict__", {}).items()):
        if value is joined:
            setattr(node, name, None)
