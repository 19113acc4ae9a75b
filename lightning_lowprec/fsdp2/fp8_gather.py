"""Gather weights as codes under FSDP2: shards in float32 or bf16, float8 codes in the all-gather.

The life of such a weight, on one rank:

    Parameter   nn.Parameter of a converted layer, float32 or bf16
      |           gather_in_fp8: becomes an Fp8GatherShard of the whole weight, which shares its memory
      v           fully_shard: cuts the weight into equal parts along the rows
    shard       DTensor, whose local tensor is an Fp8GatherShard (high precision, updated by the optimizer)
      |           GatherScales.refresh: scale = FMAX / max|weight| over all ranks, one all-reduce for all weights;
      |           of a format with a scale per tile, the largest values of all tiles are reduced
      v           fsdp_pre_all_gather: codes = saturate(shard * scale).to(float8)
    codes       a byte per element, sent as uint8, which gloo knows too, and kept for the gathers that follow
      |           all-gather
      v           fsdp_post_all_gather: codes and scale as the tensor that the layer's backend computes with
    gathered    the whole weight in codes
      |           forward and backward
      v
    GEMM        output, and the gradient of the whole weight
      |           FSDP2: reduce-scatter in float32
      v
    gradient    of the shard
      |           optimizer.step writes to the shard
      v           __torch_dispatch__ sees the write and marks the scales as stale
    step        the next forward begins with GatherScales.refresh

Every write to a shard makes the scales stale: by an optimizer, by a checkpoint or by hand, to the shard or to a view of
it. So a scale of older weights is never used. While the scales are stale, every weight reduces its own maximum when it
is gathered. Ranks may cut a tile: every rank knows the scales of all tiles, four bytes for each.

A shard is encoded once per optimizer step, and all micro-batches send these codes, in forward and backward. The first
refresh allocates the memory of the codes of all weights, which later codes take again. A shard that CPU offloading
moves to the device is a new tensor for every gather, and so is encoded at every gather, into new memory.

A weight that a product in high precision reads (recipes per layer) is none of these: FSDP2 gathers it as any other. A
backend defines the arithmetic and the tensor that its layers get (:class:`WireFormat`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_lowprec.numerics.parameters import grouped, mesh_of
from lightning_lowprec.numerics.tiles import Tile, largest_of_rows
from lightning_lowprec.private import torch as private
from lightning_lowprec.private.torch import local_tensor


class WireFormat(Protocol):
    """The arithmetic of a backend; gathered weights equal the weights that its layers would quantise themselves."""

    dtype: torch.dtype
    """A float8."""
    least_amax: float
    """The lower bound of the largest absolute value: a smaller one is replaced."""
    tile: Tile | None
    """Rows and columns of what has a scale of its own; None: the weight has one scale."""
    per_step: bool
    """Whether a shard is encoded once per optimizer step, and its codes are kept, instead of at every all-gather."""

    def scales(self, amax: Tensor) -> Tensor:
        """Return the scales of weights from their largest absolute values: (...) any float -> (...) float32.

        With tiles: of all tiles of one weight, [rows, columns].
        """

    def encode(self, values: Tensor, scale: Tensor, *, first: int = 0, out: Tensor | None = None) -> Tensor:
        """Encode a weight, or a part, maybe into ``out``: (...) any float, scalar float32 -> (...) ``dtype``.

        With tiles: the scales of all tiles, and the ``first`` row of the part.
        """

    def whole(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight for the layer's forward, sharing the memory of ``codes``; it appears to have ``dtype``."""

    def refill(self, whole: Tensor, codes: Tensor, scale: Tensor) -> None:
        """Give a tensor that ``whole`` returned earlier other codes."""


@dataclass(frozen=True)
class WiredWeight:
    """A weight that can be gathered in float8."""

    layer: Any
    name: str

    @property
    def weight(self) -> Any:
        """The weight; no parameter if a hook computes it."""
        return getattr(self.layer, self.name)


def wired_weights(model: nn.Module) -> list[WiredWeight]:
    """Return the weights of layers with a ``wire_format``: ``weight``, or the names in the layer's ``wired``."""
    layers = [module for module in model.modules() if getattr(module, "wire_format", None) is not None]
    return [WiredWeight(layer, name) for layer in layers for name in getattr(layer, "wired", ("weight",))]


_aten = torch.ops.aten
# FSDP2 makes and moves shards by these operations, so their results are shards too. The results of views are shards as
# well, because a write to a view is a write to the shard.
_KEEP_CLASS = {
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.copy_.default,
    *private.MOVING_OPERATIONS,
    _aten.clone.default,
}
# The result of these operations has the values of the shard, and so the scale of the shard.
_SAME_VALUES = {
    _aten.detach.default,
    _aten.view.default,
    _aten.as_strided.default,
    *private.MOVING_OPERATIONS,
    _aten.clone.default,
}


@final
class GatherScales:
    """The scales of all weights of one model that are gathered as float8; all have the ``format`` of one backend."""

    def __init__(self, format: WireFormat) -> None:
        self.format = format
        self.weights: list[Tensor] = []
        self.stale = True
        self.keeps_codes = False  # whether shards keep their codes: known after the first `refresh`
        self.reductions = 0  # the number of times that `refresh` has computed scales

    def collect(self, model: nn.Module) -> None:
        """Find the weights; call this after ``fully_shard``."""
        weights = {id(wired.weight): wired.weight for wired in wired_weights(model)}
        self.weights = [weight for weight in weights.values() if isinstance(local_tensor(weight), Fp8GatherShard)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of all weights with one all-reduce per mesh, if a weight has changed."""
        shards: list[Any] = [local_tensor(weight) for weight in self.weights]
        if all(shard.known_scale() is not None for shard in shards):
            return
        for weights in grouped(self.weights, mesh_of):
            for weight, scale in zip(weights, self._scales_of(weights), strict=True):
                shard: Any = local_tensor(weight)
                shard._scale = scale
                shard.version_of_scale = shard.version()
                self.keeps_codes = self.format.per_step and shard.device == scale.device
                if self.keeps_codes:
                    shard.allocate_codes()
        self.stale = False
        self.reductions += 1

    def _scales_of(self, weights: list[Tensor]) -> Sequence[Tensor]:
        """Return the scales of weights of one mesh, or of all tiles of each weight; offloaded shards are on CPU."""
        first: Any = weights[0]
        mesh, format = first.device_mesh, self.format
        if (tile := format.tile) is None:
            amax: Any = private.largest_absolute_values(weights)  # partial values of the ranks, which `clamp` reduces
            amax = torch.clamp(amax.to(mesh.device_type), min=format.least_amax)
            return format.scales(amax.to_local()).unbind()
        grids = [_largest(local_tensor(weight), tile, weight.shape, mesh).to(mesh.device_type) for weight in weights]
        amax = torch.cat([grid.flatten() for grid in grids])
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group(mesh.ndim - 1))
        parts = amax.clamp_(min=format.least_amax).split([grid.numel() for grid in grids])
        return [format.scales(part.view_as(grid)) for part, grid in zip(parts, grids, strict=True)]


@final
class KeptCodes:
    """The codes of a shard under one scale; on CUDA further codes take the same memory.

    Construct on the stream that computes, before the gathers of a forward begin. Memory of the stream that copies would
    lie between the buffers of gathers, and the allocator could not use the memory of two neighbouring buffers as one.

    A stream that comes after another stream waits for all its work: so no stream reads unfinished codes, and no stream
    writes to memory that a copy, or an earlier owner, still reads. And the allocator knows every stream
    (``record_stream``): after the shard is freed, no tensor gets the memory before the last copy has read the codes.
    FSDP2 copies the codes into the buffer that is sent, on the stream that asks for the codes.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # a training step writes to memory that an evaluation has allocated
            self.codes = torch.empty(values.shape, dtype=dtype, device=values.device)
        self._scale: Tensor | None = None
        self._stream = _stream(self.codes)

    def of(self, scale: Tensor, encode: Callable[..., Tensor]) -> Tensor:
        """Return the codes, ready for the current stream; ``encode(out=...)`` makes them for another ``scale``."""
        stream = _stream(self.codes)
        if stream is not None and self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self.codes.record_stream(stream)
            self._stream = stream
        if scale is not self._scale:
            self.codes = encode(out=None if stream is None else self.codes)
            self._scale = scale
        return self.codes

    def forget(self) -> None:
        """Encode at the next call of :meth:`of`, also under the same scale."""
        self._scale = None


def _stream(codes: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(codes.device) if codes.is_cuda else None


@final
class Fp8GatherShard(Tensor):
    """A shard that is gathered as codes; it shares the values of ``tensor`` in high precision."""

    _tensor: Tensor
    _scales: GatherScales
    _scale: Tensor | None
    _kept: KeptCodes | None
    """The codes that were sent last, and memory for the next codes; None if codes are not kept."""

    @staticmethod
    def __new__(cls, tensor: Tensor, scales: GatherScales) -> "Fp8GatherShard":
        """Return a tensor without memory, shaped and strided like ``tensor``."""
        same = {name: getattr(tensor, name) for name in ("dtype", "layout", "device", "requires_grad")}
        made: Fp8GatherShard = private.make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), **same
        )
        return made

    def __init__(self, tensor: Tensor, scales: GatherScales) -> None:
        self._tensor = tensor
        self._scales = scales
        self.sent_as = scales.format.dtype
        self._scale = None
        self._kept = None
        self.shown: Tensor | None = None  # what state dicts show: writes to it pass by, but torch counts them
        self.version_of_scale = 0

    def version(self) -> int:
        """Return how often the values were written as those of a state dict; ``distributed.checkpoint.load`` does."""
        return sum(t._version for t in (self._tensor, self.shown) if t is not None and not t.is_inference())

    def known_scale(self) -> Tensor | None:
        """Return the scale, unless a write has made it old."""
        written = self.shown is not None and self.version() != self.version_of_scale
        return None if written or self._scales.stale else self._scale

    def note_written(self) -> None:
        """Note a write to the values, such as one by a kernel, which torch did not see."""
        self._scales.stale = True
        self._scale = None  # `refresh` does not know a copy, which may take the place of a weight later

    def allocate_codes(self) -> None:
        """Allocate the memory of the codes, if the shard has none."""
        if self._kept is None:
            self._kept = KeptCodes(self._tensor, self.sent_as)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes `func` first
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scales: list[GatherScales] = []

        def unwrap(weight: "Fp8GatherShard") -> Tensor:
            scales.append(weight._scales)
            return weight._tensor

        plain_args, plain_kwargs = private.tree_map_only(Fp8GatherShard, unwrap, (args, kwargs))
        for target in private.written_arguments(func, args, kwargs):
            for weight in private.tree_leaves(target):
                if isinstance(weight, Fp8GatherShard):
                    weight.note_written()
        out = func(*plain_args, **plain_kwargs)
        if func not in _KEEP_CLASS and not func.is_view:
            return out
        kept = private.tree_map_only(Tensor, lambda t: Fp8GatherShard(t, scales[0]), out)
        if func in _SAME_VALUES:  # such as a shard that CPU offloading moves to the device
            kept._scale = args[0].known_scale()
        return kept

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, bool]]:
        """Return the codes to send, and the scale, which every rank knows; called by FSDP2.

        Codes are kept if the format says so, and if their scale is the one of all weights. :meth:`fsdp_post_all_gather`
        also gets whether the memory of the scale belongs to the stream of this call, on which FSDP2 copies.
        """
        format, values, scale = self._scales.format, self._tensor, self.known_scale()
        place: dict[str, Any] = {} if format.tile is None else {"first": _first_row(values, mesh)}
        if scale is None:
            if format.tile is None:
                amax = values.abs().amax().float()
            else:
                amax = _largest(values, format.tile, outer_size, mesh)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
            scale = format.scales(amax.clamp(min=format.least_amax))
            return (format.encode(values, scale, **place).view(torch.uint8),), (scale, True)
        if self._scales.keeps_codes:
            self.allocate_codes()  # of a shard that took the place of another, such as by `model.bfloat16()`
        encode = partial(format.encode, values, scale, **place)
        codes = encode() if self._kept is None else self._kept.of(scale, encode)
        return (codes.view(torch.uint8),), (scale, False)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, bool],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight, ready for the GEMM; called by FSDP2. Later gathers fill the memory of the first."""
        (sent,) = all_gather_outputs
        codes = sent.view(self.sent_as)
        scale, made_while_copying = metadata
        if made_while_copying and scale.is_cuda:  # no other tensor gets the memory before the GEMMs have read the scale
            scale.record_stream(torch.cuda.current_stream(scale.device))
        if out is None:
            return self._scales.format.whole(codes, scale, param_dtype), (sent,)
        self._scales.format.refill(local_tensor(out), codes, scale)
        return None

    def __tensor_flatten__(self) -> tuple[list[str], GatherScales]:
        return ["_tensor"], self._scales

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scales: GatherScales, *size: object) -> "Fp8GatherShard":
        return Fp8GatherShard(inner["_tensor"], scales)

    def __deepcopy__(self, memo: dict[int, object]) -> "Fp8GatherShard":
        """Return a shard with memory of its own, which keeps no codes."""
        memo[id(self)] = copied = self.detach().clone()
        return copied  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._tensor.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self._tensor.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._tensor}, gathered as {self.sent_as})"


def _first_row(shard: Tensor, mesh: DeviceMesh) -> int:
    return mesh.get_local_rank(mesh.ndim - 1) * len(shard)  # a mesh may have copies, and then shards


def _largest(shard: Tensor, tile: Tile, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    """Return the largest values of all tiles of a weight, 0 in tiles of other ranks."""
    return largest_of_rows(shard, tile, shape[0], _first_row(shard, mesh))


def gather_in_fp8(model: nn.Module) -> GatherScales | None:
    """Replace the weights of FP8 layers by :class:`Fp8GatherShard` tensors; call this before ``fully_shard``.

    Weights that another layer shares (tied embeddings), or that are no parameters, stay; None if all do. Call
    :meth:`GatherScales.collect` after ``fully_shard``.
    """
    weights = _gathered_weights(model)
    if not weights:
        return None
    scales = GatherScales(weights[0].layer.wire_format)
    unique = {id(wired.weight): wired.weight for wired in weights}
    new = {key: nn.Parameter(Fp8GatherShard(w.detach(), scales), w.requires_grad) for key, w in unique.items()}
    for wired in weights:
        key = id(wired.weight)
        setattr(wired.layer, wired.name, new[key])
        wired.layer.register_state_dict_post_hook(partial(_plain_weight, wired.name))
    return scales


def _plain_weight(name: str, layer: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    shard = local_tensor(getattr(layer, name))
    if isinstance(shard, Fp8GatherShard):
        if shard.shown is None:
            with torch.inference_mode(False):
                shard.shown = private.with_local_tensor(shard._tensor, getattr(layer, name))
        if shard._kept is not None:
            shard._kept.forget()  # torch does not count writes to `.data`
        state_dict[f"{prefix}{name}"] = shard.shown


def check_even(model: nn.Module, shards: int) -> None:
    """Raise ValueError if a weight that would be gathered as codes does not divide into equal parts."""
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    for wired in _gathered_weights(model):
        rows = wired.weight.shape[0]
        if rows % shards:
            fqn = fqns[id(wired.layer)]
            if wired.weight.dim() == 3:
                fqn, what = f"{fqn}.{wired.name}", "experts"
            else:  # [in, out] in a Conv1D of transformers
                what = f"{'output' if rows == wired.layer.out_features else 'input'} features"
            raise ValueError(
                f"{fqn!r} has {rows} {what}, which do not divide into {shards} equal"
                " shards, and uneven shards cannot be gathered as codes. Keep it in bf16 (`keep=[...]`), shard over"
                " a divisor (`replicate=`), or gather in high precision (`fp8_all_gather=False`)."
            )


def _gathered_weights(model: nn.Module) -> list[WiredWeight]:
    # `weight_norm` computes a weight at each forward, so the weight is no parameter
    parameters = [wired for wired in wired_weights(model) if isinstance(wired.weight, nn.Parameter)]
    inside = {(id(wired.layer), wired.name) for wired in parameters}
    shared = {id(p) for m in model.modules() for name, p in m._parameters.items() if (id(m), name) not in inside}
    return [wired for wired in parameters if id(wired.weight) not in shared]
