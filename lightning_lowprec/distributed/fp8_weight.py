"""Weights that FSDP2 gathers as float8: float32 or bf16 shards, codes and one scale per weight on the wire.

    codes = saturate(shard * scale).to(float8)        # on every rank, before the all-gather
    scale = FMAX / max(|weight|)                      # of the whole weight, so over all ranks

FSDP2 asks a parameter's tensor for what to send (``fsdp_pre_all_gather``) and gives it what arrived
(``fsdp_post_all_gather``). The scale is known before the first gather of a step: after the weights have changed, one
all-reduce serves all of them (:meth:`GatherScales.refresh`). A write to any shard, by an optimizer, a checkpoint or by
hand, goes through ``__torch_dispatch__`` here and makes the scales stale, so a scale of older weights is never used;
while they are stale, every weight reduces its own.

The arithmetic is torchao's, and so is the tensor that the layers see (``Float8TrainingTensor``). torchao has such a
weight too; its scales go stale in silence when a checkpoint is loaded after they were computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import EPS

from lightning_lowprec.distributed.several_meshes import by_mesh
from lightning_lowprec.layers.torchao import FP8Linear, fp8_linears

_aten = torch.ops.aten
_KEEP_CLASS = {  # what FSDP2 makes shards with, and what moves or aliases them
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.copy_.default,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
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
        mm_config: torchao's settings of the three GEMMs, the same for all layers of a model.
        dtype: the float8 dtype of the weights.
    """

    def __init__(self, mm_config: LinearMMConfig, dtype: torch.dtype) -> None:
        self.mm_config = mm_config
        self.dtype = dtype
        self.weights: list[Tensor] = []
        self.stale = True
        self.reductions = 0
        """How often :meth:`refresh` has reduced."""

    def collect(self, model: nn.Module) -> None:
        """Find the weights, when ``model`` is sharded."""
        weights = {id(layer.weight): layer.weight for layer in fp8_linears(model)}
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
        amax = torch.clamp(amax.to(cast(DTensor, amax).device_mesh.device_type), EPS)
        scales = torch.finfo(self.dtype).max / amax.to(torch.float64)  # as torchao: eager and compiled agree in fp64
        if amax.dtype == torch.float16:
            scales = torch.clamp(scales, max=torch.finfo(torch.float16).max)
        local = cast(DTensor, scales).to_local().to(torch.float32)
        for weight, scale in zip(weights, local.unbind(), strict=True):
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
        for written in _written(func, args, kwargs):
            for weight in pytree.tree_leaves(written):
                if isinstance(weight, GatheredWeight):
                    weight._scales.stale = True
        out = func(*plain_args, **plain_kwargs)
        if func not in _KEEP_CLASS:
            return out
        kept = pytree.tree_map_only(Tensor, lambda t: GatheredWeight(t, scales[0]), out)
        if func in _SAME_VALUES:  # a shard that CPU offloading moves to the device keeps its scale
            kept._scale = args[0]._scale
        return kept

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Called by FSDP2: the codes to send, and the scale, which every rank knows."""
        scales = self._scales
        if scales.stale or self._scale is None:
            codes = hp_tensor_to_float8_dynamic(
                self._tensor,
                scales.dtype,
                scales.mm_config,
                reduce_amax=True,
                gemm_input_role=GemmInputRole.WEIGHT,
                device_mesh=mesh,
            )
        else:
            codes = hp_tensor_and_scale_to_float8(
                self._tensor, self._scale, scales.dtype, scales.mm_config, GemmInputRole.WEIGHT
            )
        return (codes._data,), codes._scale

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
            whole = Float8TrainingTensor(
                codes, metadata, param_dtype, self._scales.mm_config, gemm_input_role=GemmInputRole.WEIGHT
            )
            return whole, (codes,)
        inner = out._local_tensor if isinstance(out, DTensor) else out
        assert isinstance(inner, Float8TrainingTensor)
        inner._scale = metadata
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
        return f"{type(self).__name__}({self._tensor}, gathered as {self._scales.dtype})"


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that ``func`` writes to."""
    positions = _write_positions(func)
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in positions]


def gather_in_fp8(model: nn.Module, shards: int) -> GatherScales | None:
    """Make the weights of FP8 layers ones that FSDP2 gathers as float8; call before ``fully_shard``.

    The parameters of these layers are replaced, as ``fully_shard`` replaces all of them. A weight that a layer without
    FP8 shares (tied embeddings) stays as it is. Call :meth:`GatherScales.collect` after ``fully_shard``.

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
    scales = GatherScales(layers[0].linear_mm_config, layers[0].config.cast_config_weight.target_dtype)
    new: dict[int, nn.Parameter] = {}
    for layer in layers:
        weight = layer.weight
        if id(weight) not in new:
            values = GatheredWeight(weight.detach(), scales)
            new[id(weight)] = nn.Parameter(values, requires_grad=weight.requires_grad)
        layer.weight = new[id(weight)]
        layer.register_state_dict_post_hook(_plain_weight)  # type: ignore[no-untyped-call]
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


def _gathered_layers(model: nn.Module) -> list[FP8Linear]:
    layers = fp8_linears(model)
    shared = _shared_outside(model, layers)
    return [layer for layer in layers if id(layer.weight) not in shared]


def _shared_outside(model: nn.Module, layers: Sequence[FP8Linear]) -> set[int]:
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
