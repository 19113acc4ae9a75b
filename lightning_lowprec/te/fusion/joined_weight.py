"""Join several weights for a single GEMM, without a copy where they lie beside each other in memory.

Query, key and value (gate and up) stay separate Parameters, but one GEMM takes one weight:

    storage   | q q q q q q | k k | v v |      three Parameters, views of one storage (:func:`place_beside`)
    joined    | <------------------> |         one view of the same memory: nothing is copied

Whatever gives a Parameter other memory (``.to()``, a cast, deepcopy, FSDP2, ``load_state_dict(assign=True)``) ends
that. The addresses say so, without a wait for the GPU. The next forward places the weights beside each other again if
the memory belongs to them alone; if not, as under FSDP2, the weights are copied at each forward. Then autograd would
keep the joined copy for the backward, 4 bytes per weight of the whole model. Instead autograd keeps the Parameters, and
the backward joins them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lightning_lowprec.private.torch import saved_tensors, users_of_storage, version_of

_JOIN_AGAIN = object()


def join_weights(parts: Sequence[Tensor]) -> Tensor:
    """[N0, ...], [N1, ...], ... -> [N0 + N1 + ..., ...]; a view if the parts are beside each other, else a copy.

    A single part is returned unchanged. Gradients reach every part.
    """
    if len(parts) == 1:
        return parts[0]
    if not are_beside(parts):
        return torch.cat(tuple(parts))
    joined: Tensor = _View.apply(*parts) if torch.is_grad_enabled() else _view(parts)  # type: ignore[no-untyped-call]
    return joined


def are_beside(parts: Sequence[Tensor]) -> bool:
    """Return whether the parts follow each other in one storage, without gaps."""
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.dtype != first.dtype or part.untyped_storage().data_ptr() != storage:
            return False
        if not part.is_contiguous():
            return False
        end += part.numel() * part.element_size()
    return True


@torch.no_grad()
def place_beside(parts: Sequence[Tensor]) -> bool:
    """Give Parameters that own their memory one storage, one after another; return whether they are beside each other.

    The Parameters stay the same objects with the same values. Nothing happens to a Parameter whose memory is looked at
    by another tensor, is shared between processes, or is not there yet, nor to any subclass of Parameter.
    """
    if len(parts) == 1 or not all(map(_owns_its_memory, parts)) or len({(p.dtype, p.device) for p in parts}) > 1:
        return len(parts) > 1 and not any(part.is_meta for part in parts) and are_beside(parts)
    joined = torch.cat([part.detach() for part in parts])
    for part, place in zip(parts, torch.split(joined, [len(part) for part in parts]), strict=True):
        part.data = place
    return True


@torch.no_grad()
def place_apart(parts: Sequence[Tensor]) -> None:
    """Undo :func:`place_beside`: give every Parameter memory of its own."""
    if len(parts) > 1 and not any(part.is_meta for part in parts) and are_beside(parts):
        for part in parts:
            part.data = part.detach().clone()


def _owns_its_memory(part: Tensor) -> bool:
    if type(part) is not nn.Parameter or part.is_meta or not part.is_contiguous():
        return False
    storage = part.untyped_storage()
    whole = storage.nbytes() == part.numel() * part.element_size()
    shared = part.device.type == "cpu" and storage.is_shared()  # memory of several processes
    return whole and not shared and users_of_storage(storage) == 1


def _view(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0].detach()
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


@final
class _View(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [len(part) for part in parts]
        return _view(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = zip(ctx.needs_input_grad, torch.split(grad, ctx.sizes), strict=True)
        return tuple(part if needed else None for needed, part in parts)


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
