"""Weights that FSDP2 gathers as float8: float32 or bf16 shards, codes and one scale per weight on the wire.

    codes = saturate(shard * scale).to(float8)        # on every rank, before the all-gather
    scale = FMAX / max(|weight|)                      # of the whole weight, so over all ranks

FSDP2 asks a parameter's tensor for what to send (``fsdp_pre_all_gather``) and gives it what arrived
(``fsdp_post_all_gather``). The scale is known before the first gather of a step: after the weights have changed, one
all-reduce serves all of them (:meth:`GatherScales.refresh`). A write to any shard, by an optimizer, a checkpoint or by
hand, goes through ``__torch_dispatch__`` here and makes the scales stale, so a scale of older weights is never used;
while they are stale, every weight reduces its own.

What the arithmetic is, and which tensor the layers see, is for the backend of the layers to say
(:mod:`~lightning_lowprec.numerics.wire_format`). torchao has such a weight of its own; its scales go stale in silence when a
checkpoint is loaded after they were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_lowprec.fsdp2.several_meshes import by_mesh
from lightning_lowprec.numerics.wire_format import WireFormat, wired_layers
from lightning_lowprec.private.torch import written_arguments

_aten = torch.ops.aten
_KEEP_CLASS = {  # what FSDP2 makes shards with and moves them by; views too, whose writes are writes to the shard
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.copy_.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.clone.default,
}
_SAME_VALUES = {
    _aten.detach.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.clone.default,
}


class GatherScales:
    """The scales of all FP8 weights of one model.

    Args:
        format: how the weights travel, the same for all layers of a model.
    """

    def __init__(self, format: WireFormat) -> None:
        self.format = format
        self.weights: list[Tensor] = []
        self.stale = True
        self.reductions = 0
        """How often :meth:`refresh` has reduced."""

    def collect(self, model: nn.Module) -> None:
        """Find the weights, when ``model`` is sharded."""
        weights = {id(layer.weight): layer.weight for layer in wired_layers(model)}
        self.weights = [w for w in weights.values() if isinstance(getattr(w, "_local_tensor", None), GatheredWeight)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the scales of all weights with one all-reduce per mesh, if a weight was written to since."""
        if not self.stale or not self.weights:
            return
        for weights in by_mesh(self.weights):
            self._compute(weights)
        self.stale = False
        self.reductions += 1

    def _compute(self, weights: list[Tensor]) -> None:
        # a norm of infinite order is max(|w|); it is a partial value per rank, which `clamp` reduces
        amax = torch.stack(torch._foreach_norm(weights, ord=torch.inf))
        # offloaded shards are on CPU, which nccl does not reduce
        amax = torch.clamp(amax.to(cast(DTensor, amax).device_mesh.device_type), min=self.format.least_amax)
        scales = self.format.scales(cast(DTensor, amax).to_local())
        for weight, scale in zip(weights, scales.unbind(), strict=True):
            shard = cast(DTensor, weight)._local_tensor
            assert isinstance(shard, GatheredWeight)
            shard._scale = scale


class GatheredWeight(Tensor):
    """A weight, or its shard, that is gathered as float8.

    Args:
        tensor: the values, any float dtype; shared, not copied.
        scales: of the model it belongs to.
    """

    _tensor: Tensor
    _scales: GatherScales
    _scale: Tensor | None

    @staticmethod
    def __new__(cls, tensor: Tensor, scales: GatherScales) -> GatheredWeight:
        """A tensor without memory of its own, shaped and strided like ``tensor``."""
        made: GatheredWeight = Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        return made

    def __init__(self, tensor: Tensor, scales: GatherScales) -> None:
        self._tensor = tensor
        self._scales = scales
        self._scale = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes `func` first
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on the values; mark the scales stale if it writes to any of them."""
        kwargs = kwargs or {}
        scales: list[GatherScales] = []

        def unwrap(weight: GatheredWeight) -> Tensor:
            scales.append(weight._scales)
            return weight._tensor

        plain_args, plain_kwargs = pytree.tree_map_only(GatheredWeight, unwrap, (args, kwargs))
        for target in written_arguments(func, args, kwargs):
            for weight in pytree.tree_leaves(target):
                if isinstance(weight, GatheredWeight):
                    weight._scales.stale = True
        out = func(*plain_args, **plain_kwargs)
        if func not in _KEEP_CLASS and not func.is_view:
            return out
        kept = pytree.tree_map_only(Tensor, lambda t: GatheredWeight(t, scales[0]), out)
        if func in _SAME_VALUES:  # a shard that CPU offloading moves to the device keeps its scale
            kept._scale = args[0]._scale
        return kept

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Called by FSDP2: the codes to send, and the scale, which every rank knows."""
        format, scale = self._scales.format, self._scale
        if self._scales.stale or scale is None:
            amax = self._tensor.abs().amax().float()
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
            scale = format.scales(amax.clamp(min=format.least_amax))
        return (format.encode(self._tensor, scale),), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Called by FSDP2: the whole weight, ready for the GEMM; later gathers fill the memory of the first."""
        (codes,) = all_gather_outputs
        if out is None:
            return self._scales.format.whole(codes, metadata, param_dtype), (codes,)
        self._scales.format.refill(out._local_tensor if isinstance(out, DTensor) else out, codes, metadata)
        return None

    def __tensor_flatten__(self) -> tuple[list[str], GatherScales]:
        """What compilers trace through."""
        return ["_tensor"], self._scales

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scales: GatherScales, size: Any, stride: Any) -> GatheredWeight:
        """The inverse."""
        return GatheredWeight(inner["_tensor"], scales)

    def data_ptr(self) -> int:
        """Where the values are."""
        return self._tensor.data_ptr()

    def __repr__(self) -> str:  # type: ignore[override]
        """The values, and how they are gathered."""
        return f"{type(self).__name__}({self._tensor}, gathered as {self._scales.format.dtype})"


def gather_in_fp8(model: nn.Module, shards: int) -> GatherScales | None:
    """Make the weights of FP8 layers ones that FSDP2 gathers as float8; call before ``fully_shard``.

    The parameters of these layers are replaced, as ``fully_shard`` replaces all of them. A weight that a layer without
    FP8 shares (tied embeddings) stays as it is, and so does one that is no parameter. Call :meth:`GatherScales.collect`
    after ``fully_shard``.

    Args:
        model: converted; None comes back if no layer of it is FP8.
        shards: into how many parts each weight will be cut.

    Raises:
        ValueError: a weight does not divide into equal parts.
    """
    check_even(model, shards)
    layers = _gathered_layers(model)
    if not layers:
        return None
    scales = GatherScales(layers[0].wire_format)
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in new:
            values = GatheredWeight(weight.detach(), scales)
            new[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        layer.weight = new[id(weight)]
        layer.register_state_dict_post_hook(_plain_weight)
    return scales


def _plain_weight(layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    state_dict[f"{prefix}weight"] = plain(state_dict[f"{prefix}weight"])


def check_even(model: nn.Module, shards: int) -> None:
    """Raise ValueError if a weight that would be gathered as float8 does not divide into equal parts."""
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    for layer in _gathered_layers(model):
        if layer.out_features % shards:
            raise ValueError(
                f"{fqns[id(layer)]!r} has {layer.out_features} output features, which do not divide into {shards} equal"
                " shards, and uneven shards cannot be gathered in float8. Keep it out of FP8 (`keep=[...]`), shard over"
                " a divisor (`replicate=`), or gather in high precision (`fp8_all_gather=False`)."
            )


def _gathered_layers(model: nn.Module) -> list[Any]:
    layers = wired_layers(model)
    shared = _shared_outside(model, layers)
    # `weight_norm` computes a weight at each forward
    return [layer for layer in layers if isinstance(layer.weight, nn.Parameter) and id(layer.weight) not in shared]


def _shared_outside(model: nn.Module, layers: Sequence[nn.Module]) -> set[int]:
    inside = set(map(id, layers))
    return {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}


def plain(tensor: Tensor) -> Tensor:
    """A tensor as a checkpoint holds it: the values of a weight that is gathered as float8, sharing their memory."""
    if isinstance(tensor, GatheredWeight):
        return tensor._tensor
    if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, GatheredWeight):
        make: Callable[..., Tensor] = DTensor.from_local
        return make(
            tensor._local_tensor._tensor,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor
