"""Weights of codes under FSDP2 (MS-AMP's O3): e4m3 codes are gathered, one byte per element.

    scale_linears(model, fqns, "O3")
    coded = code_shards(model, shards=mesh.size())     # before fully_shard
    fully_shard(model, mesh=mesh)
    coded.collect(mesh)                                # after fully_shard, before the optimizer
    optimizer = ScaledAdamW(model.parameters(), level="O3")

The life of a weight on one rank:

    Parameter of codes
        | code_shards
        v
    MsampShard: all codes and the master
        | fully_shard cuts both
        v
    MsampShard: codes and master of this rank ---- codes, all-gather ----> MsampShard: all codes, no master
        ^                                                                      | three GEMMs
        |                                                                      v
        +---- step on the shard <---- float32 shard <---- reduce-scatter ---- float32 gradient

FSDP2 knows float32 and bf16 parameters, so a MsampShard looks like a float32 tensor. The scale belongs to the whole
weight, and every rank has it. With ``param_dtype=bfloat16`` FSDP2 rounds gradients to bf16 before it reduces them. A
step takes one all-reduce for its new scales (per 16 million elements and group of parameters). State dicts have float32
DTensors, so they fit any number of ranks; loading a state dict is a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_lowprec.msamp.linear import ScaledLinear, scaled_linears
from lightning_lowprec.msamp.weight import MsampWeightState, required_state_of
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import saturating_cast
from lightning_lowprec.private.torch import disabled_torch_function, make_wrapper_subclass, written_arguments

_aten: Any = torch.ops.aten
_CUT: Final = {  # the operations by which FSDP2 makes, moves and aliases shards
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten._to_copy.default,
    _aten._pin_memory.default,
    _aten.split.Tensor,
    _aten.clone.default,
}


@final
class MsampShard(Tensor):
    """Codes and their float16 master, or a part of both, or gathered codes alone; shown as a float32 tensor.

    Args:
        codes: (...) float8_e4m3fn.
        master: (...) float16; None for gathered codes.
        state: has the scales.
        dtype: the dtype that torch sees, also for the gradient.
    """

    codes: Tensor
    master: Tensor | None
    msamp_state: MsampWeightState

    @staticmethod
    def __new__(
        cls, codes: Tensor, master: Tensor | None, state: MsampWeightState, dtype: torch.dtype = torch.float32
    ) -> MsampShard:
        """Make a tensor without memory for float32 values, shaped and strided like the codes."""
        shard: MsampShard = make_wrapper_subclass(
            cls,
            codes.size(),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
        )
        shard.codes, shard.master, shard.msamp_state = codes, master, state
        return shard

    def values(self) -> Tensor:
        """Return the values of the codes: (...) float32."""
        return self.codes.float() / self.msamp_state.scale

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cut, move and copy codes and master; let other operations read the values; refuse other writes."""
        kwargs = kwargs or {}
        if func in _CUT:
            return _cut(func, args, kwargs)
        if func is _aten.copy_.default and isinstance(args[0], MsampShard):
            _copy_(args[0], args[1])
            return args[0]
        if any(isinstance(t, MsampShard) for t in pytree.tree_leaves(written_arguments(func, args, kwargs))):
            raise RuntimeError(f"{func} would write to a weight that is kept as codes with a scale; use `set_values_`.")
        return func(*pytree.tree_map_only(MsampShard, MsampShard.values, args), **kwargs)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Return the codes to send, for FSDP2."""
        return (self.codes.view(torch.uint8),), self.msamp_state

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Return the whole weight, for FSDP2; later gathers fill the memory of the first gather."""
        if out is not None:
            return None
        (gathered,) = all_gather_outputs
        return MsampShard(gathered.view(E4M3.dtype), None, metadata, param_dtype), (gathered,)

    def data_ptr(self) -> int:
        """Return the address of the codes."""
        return self.codes.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Show the shape and the scale."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, scale={self.msamp_state.scale})"


def _cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the codes and on the master, each in its dtype."""
    first: MsampShard = args[0]
    if kwargs.get("dtype") not in (None, first.dtype):
        return func(first.values(), *args[1:], **kwargs)
    kept = {name: value for name, value in kwargs.items() if name != "dtype"}
    codes = func(first.codes, *args[1:], **kept)
    if first.master is None:
        return pytree.tree_map_only(Tensor, lambda c: MsampShard(c, None, first.msamp_state, first.dtype), codes)
    masters = func(first.master, *args[1:], **kept)
    if isinstance(codes, Tensor):
        return MsampShard(codes, masters, first.msamp_state)
    return [MsampShard(c, m, first.msamp_state) for c, m in zip(codes, masters, strict=True)]


def _copy_(target: MsampShard, source: Tensor) -> None:
    """Copy codes and master; encode values with the present scale, which ``set_values_`` makes fit afterwards."""
    if not isinstance(source, MsampShard):
        target.codes.copy_(saturating_cast(source.float() * target.msamp_state.scale, E4M3))
        return
    target.codes.copy_(source.codes)
    if target.master is not None and source.master is not None:
        target.master.copy_(source.master)


@final
class MeshShards:
    """The ranks of a mesh that share weights (see :class:`~lightning_lowprec.msamp.weight.Shards`).

    Args:
        mesh: the mesh that ``fully_shard`` got; its last dimension shards.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._dim = mesh.ndim - 1
        self._group = mesh.get_group(self._dim)
        self.rank = mesh.get_local_rank(self._dim)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the maximum over the ranks: (...) float32; a collective. NaN becomes inf, which a maximum keeps."""
        largest = torch.where(values.isnan(), torch.inf, values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest

    def to_dtensor(self, shard: Tensor, param: Tensor) -> Tensor:
        """Return a DTensor that is placed like ``param`` and has ``shard`` on this rank."""
        assert isinstance(param, DTensor)
        sizes: dict[str, Any] = {"shape": param.shape, "stride": param.stride()}
        return DTensor.from_local(shard, param.device_mesh, param.placements, run_check=False, **sizes)


@final
class PendingShards:
    """The layers of one model whose weights wait for ``fully_shard``; made by :func:`code_shards`."""

    def __init__(self, layers: Mapping[str, ScaledLinear]) -> None:
        self.layers = dict(layers)

    @torch.no_grad()
    def collect(self, mesh: DeviceMesh) -> None:
        """Let optimizers and state dicts find codes, masters and scales; call after ``fully_shard`` over ``mesh``."""
        shards = MeshShards(mesh)
        for fqn, layer in self.layers.items():
            weight: Any = layer.weight
            shard = local(weight)
            assert shard is not weight, f"{fqn!r} was not sharded"
            assert isinstance(shard, MsampShard)
            state = shard.msamp_state
            state.master, state.shards = shard.master, shards
            weight.codes = shard.codes
            state.bind(weight)


def code_shards(model: nn.Module, shards: int) -> PendingShards | None:
    """Make the weights of ScaledLinears shardable by FSDP2; call before ``fully_shard``.

    New Parameters replace the weights, as ``fully_shard`` replaces all Parameters. Gradients become float32.

    Args:
        model: with layers of :func:`~lightning_lowprec.msamp.linear.scale_linears` at level O3.
        shards: the number of parts that each weight will be cut into.

    Returns:
        The layers, whose ``collect`` must be called after ``fully_shard``; None for a model without such layers.

    Raises:
        ValueError: weights of another level, or a weight that does not divide into equal parts.
    """
    check_codes(model, shards)
    layers = scaled_linears(model)
    for layer in layers.values():
        state = required_state_of(layer.weight)
        shard = MsampShard(layer.weight.detach(), state.master, state)
        layer.weight = nn.Parameter(shard, requires_grad=layer.weight.requires_grad)
        layer.float32_gradients = True
    return PendingShards(layers) if layers else None


def check_codes(model: nn.Module, shards: int) -> None:
    """Raise the errors of :func:`code_shards`, and change nothing."""
    for fqn, layer in scaled_linears(model).items():
        if required_state_of(layer.weight).master is None:
            raise ValueError(
                f"{fqn!r} keeps float16 codes (MS-AMP's O1 or O2), which do not run under FSDP2. Use O3 (e4m3 codes and"
                " a float16 master, both sharded), or DDP."
            )
        if layer.out_features % shards:
            raise ValueError(
                f"{fqn!r} has {layer.out_features} output features, which do not divide into {shards} equal shards."
                " Leave it out of the conversion, or shard over a divisor (`replicate=`)."
            )


def check_options(options: Any, model: nn.Module) -> None:
    """Raise ValueError for sharding options, or a model on meta, that do not go with weights of codes.

    Args:
        options: has the attributes that are checked, as ``ShardOptions`` does.
        model: converted. A model without weights of codes passes.
    """
    if not scaled_linears(model):
        return
    wrong = {
        "tensor_parallel": options.tensor_parallel is not None,
        "cpu_offload": options.cpu_offload,
        "compile": options.compile is not False,
        "sync_module_states": options.sync_module_states,
    }
    for name in (name for name, given in wrong.items() if given):
        raise ValueError(
            f"`{name}={getattr(options, name)!r}` does not go with weights that are kept as codes (MS-AMP) yet. Leave"
            " it out; build the same weights on every rank."
        )
    if any(t.is_meta for t in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where weights have no values to keep as codes (MS-AMP)."
            " Build it on a real device on every rank, from one seed or one checkpoint."
        )
