"""Store the quantised optimizer state of torchao (AdamW8bit, AdamW4bit, AdamWFp8) as plain tensors, bit for bit.

A quantised tensor has codes and one scale per block of consecutive elements. If it is sharded by rows, the codes and
scales of all ranks follow each other in the whole tensor. So they are stored as tensors that are sharded by their first
dimension. That needs no pickle, and no resharding by torchao, which supports whole blocks of some classes only. If the
shards of another number of ranks would cut a block, the state is loaded dequantised.

torchao quantises a local shard that has at least 4096 elements and whole blocks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from lightning_lowprec.checkpoints.placement import place
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch import disable_autograd_cache, dtensor, local_tensor, with_local_tensor

CLASS: Final = "lowbit_class"
_CLASSES: Final = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def check(optimizer: Optimizer) -> None:
    """Check an optimizer of sharded parameters before its first step; only torchao's optimizers can be refused."""
    cls = next((c for c in type(optimizer).__mro__ if c.__module__.startswith("torchao.optim")), None)
    if cls is None:
        return
    # torch's cache looks at the outside of a DTensor only, and would run a kernel on shards of another format
    # (pytorch#188390)
    disable_autograd_cache()
    if cls.__name__.startswith("_"):  # its plain AdamW
        return
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    for dtype in dtypes.intersection(HALF_DTYPES):
        raise ValueError(
            f"`{type(optimizer).__name__}` of torchao does not update sharded {dtype} parameters. Use a"
            " precision with float32 weights ('bf16-mixed', 'bf16-master', 'fp8-hybrid'), or another optimizer."
        )


def pack(value: Any) -> Any:
    """Return quantised state as a dict of plain tensors (or DTensors, sharded by rows) and attributes; else ``value``.

    Shards that do not follow each other in the whole tensor are dequantised.
    """
    local: Any = local_tensor(value)
    if type(local).__name__ not in _CLASSES or not type(local).__module__.startswith("torchao."):
        return value
    if isinstance(value, DTensor) and _rows_of(value) is None:
        return with_local_tensor(local.dequantize(), value)
    names, _ = local.__tensor_flatten__()
    packed: dict[str, Any] = {CLASS: type(local).__name__, "shape": list(value.shape)}
    if hasattr(local, "signed"):
        packed["signed"] = local.signed
    for name in names:
        inner = getattr(local, name)
        inner = inner.view(torch.uint8) if name == "codes" else inner  # gloo gathers no float8
        if name != "qmap" and isinstance(value, DTensor):
            inner = _rows_as(value, inner)
        packed[name] = inner
    return packed


def _rows_as(value: DTensor, inner: Tensor) -> DTensor:
    """Return a DTensor whose rows on all ranks follow each other, sharded as the rows of ``value``."""
    ranks = (_rows_of(value) or (0, 1))[1]
    shape = [inner.shape[0] * ranks, *inner.shape[1:]]
    return dtensor(inner, value.device_mesh, value.placements, shape, inner.stride())


def unpack(packed: Mapping[str, Any], like: Tensor) -> Tensor:
    """Undo :func:`pack` for a parameter ``like``: quantised if the shards have whole blocks, else dequantised."""
    shape = torch.Size(packed["shape"])
    codes, scale = packed["codes"], packed["scale"]
    if not isinstance(like, DTensor):
        return _build(packed, shape, lambda t: t.detach().to(like.device, copy=True))
    if isinstance(codes, DTensor):
        return with_local_tensor(_build(packed, like.to_local().shape, lambda t: local_tensor(t).to(like.device)), like)
    if not keeps_blocks(shape.numel() // scale.numel(), like):
        return place(_build(packed, shape, torch.clone).dequantize(), like)
    rank, ranks = _rows_of(like) or (0, 1)

    def part(tensor: Tensor) -> Tensor:
        return (tensor if tensor is packed.get("qmap") else tensor.chunk(ranks)[rank]).to(like.device, copy=True)

    return with_local_tensor(_build(packed, like.to_local().shape, part), like)


def keeps_blocks(block_size: int, like: Tensor) -> bool:
    """Return whether the shards of a parameter are equal in size and consist of whole blocks."""
    return isinstance(like, DTensor) and _rows_of(like) is not None and like.to_local().numel() % block_size == 0


def _build(packed: Mapping[str, Any], shape: torch.Size, part: Callable[[Tensor], Tensor]) -> Tensor:
    cls = getattr(importlib.import_module(_CLASSES[packed[CLASS]]), packed[CLASS])  # torchao takes seconds to import
    inner = {name: part(packed[name]) for name in cls.tensor_attrs}
    if packed[CLASS] == "OptimStateFp8":
        inner["codes"] = inner["codes"].view(torch.float8_e4m3fn)
    attributes = [packed["signed"]] if "signed" in packed else []
    attributes += [shape] if packed[CLASS] == "OptimState4bit" else []
    built: Tensor = cls(*inner.values(), *attributes)  # looks like float32, as in all versions of torchao
    return built


def _rows_of(value: DTensor) -> tuple[int, int] | None:
    """Return which part of the rows is here, of how many equal parts; None if it is not sharded so."""
    sharded = [(dim, p) for dim, p in enumerate(value.placements) if not isinstance(p, Replicate)]
    if not sharded:
        return 0, 1
    (dim, placement), *more = sharded
    ranks = value.device_mesh.size(dim)
    if more or type(placement) is not Shard or placement.dim > 0 or value.shape[0] % ranks:
        return None
    return value.device_mesh.get_local_rank(dim), ranks
