"""Weights of codes under FSDP2 (MS-AMP's O3): e4m3 shards that are gathered as they are, float16 masters beside them.

    scale_linears(model, fqns, "O3")
    coded = code_shards(model, shards=mesh.size())     # before fully_shard
    fully_shard(model, mesh=mesh)
    coded.collect(mesh)                                # after it, before the optimizer
    optimizer = ScaledAdamW(model.parameters(), level="O3")

FSDP2 knows float32 and bf16 parameters; one of codes looks to it like a float32 one (:class:`MsampShard`). What it
cuts and copies is codes and master together; what it sends is the codes, one byte per element: the scale is that of the
whole weight, and every rank has it. Gradients arrive at the shards in float32 (with FSDP2's
``param_dtype=bfloat16``, rounded to that before they are reduced). A step of the optimizer works on the
shards and takes one all-reduce for its new scales (per 16 million elements and group of parameters). State dicts have
float32 DTensors, so they fit any number of ranks; loading one is a collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, final

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_lowprec.msamp.linear import ScaledLinear, scaled_linears
from lightning_lowprec.msamp.weight import MsampWeightState, msamp_state_of
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import saturating_cast
from lightning_lowprec.private.torch import written_arguments

_aten: Any = torch.ops.aten
_CUT: Final = {  # what FSDP2 makes shards with, and what moves or aliases them
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
    """Codes and their float16 master, or a part of both, or gathered codes alone; looks like a float32 tensor.

    Args:
        codes: (...) float8_e4m3fn.
        master: (...) float16; None where the codes were gathered.
        scaled: has the scales.
        dtype: what it looks like, and gets gradients in.
    """

    codes: Tensor
    master: Tensor | None
    msamp_state: MsampWeightState

    @staticmethod
    def __new__(
        cls, codes: Tensor, master: Tensor | None, scaled: MsampWeightState, dtype: torch.dtype = torch.float32
    ) -> MsampShard:
        """A tensor without memory of its own, shaped and strided like the codes."""
        make: Any = Tensor._make_wrapper_subclass
        made: MsampShard = make(
            cls,
            codes.size(),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
        )
        made.codes, made.master, made.msamp_state = codes, master, scaled
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cut, moved and copied as codes; everything else reads the values; nothing else writes."""
        kwargs = kwargs or {}
        if func in _CUT:
            return _cut(func, args, kwargs)
        if func is _aten.copy_.default and isinstance(args[0], MsampShard):
            _copy(args[0], args[1])
            return args[0]
        if any(isinstance(t, MsampShard) for t in pytree.tree_leaves(written_arguments(func, args, kwargs))):
            raise RuntimeError(f"{func} would write to a weight that is kept as codes with a scale; use `set_values_`.")
        return func(*pytree.tree_map_only(MsampShard, _values, args), **kwargs)

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Any]:
        """Called by FSDP2: the codes to send."""
        return (self.codes.view(torch.uint8),), self.msamp_state

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        """Called by FSDP2: the whole weight; later gathers fill the memory of the first."""
        if out is not None:
            return None
        (gathered,) = all_gather_outputs
        return MsampShard(gathered.view(E4M3.dtype), None, metadata, param_dtype), (gathered,)

    def data_ptr(self) -> int:
        """Where the codes are."""
        return self.codes.data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """The shape and the scale."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, scale={self.msamp_state.scale})"


def _values(coded: MsampShard) -> Tensor:
    return coded.codes.float() / coded.msamp_state.scale


def _cut(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same of codes and master, each in its own dtype."""
    first: MsampShard = args[0]
    if kwargs.get("dtype") not in (None, first.dtype):
        return func(_values(first), *args[1:], **kwargs)
    kept = {name: value for name, value in kwargs.items() if name != "dtype"}
    codes = func(first.codes, *args[1:], **kept)
    if first.master is None:
        return pytree.tree_map_only(Tensor, lambda c: MsampShard(c, None, first.msamp_state, first.dtype), codes)
    masters = func(first.master, *args[1:], **kept)
    if isinstance(codes, Tensor):
        return MsampShard(codes, masters, first.msamp_state)
    return [MsampShard(c, m, first.msamp_state) for c, m in zip(codes, masters, strict=True)]


def _copy(target: MsampShard, source: Tensor) -> None:
    """Codes are copied; values are encoded in the scale there is, which ``set_values_`` then makes a good one."""
    if not isinstance(source, MsampShard):
        target.codes.copy_(saturating_cast(source.float() * target.msamp_state.scale, E4M3))
        return
    target.codes.copy_(source.codes)
    if target.master is not None and source.master is not None:
        target.master.copy_(source.master)


@final
class MeshShards:
    """The shards of a weight over one mesh (see :class:`~lightning_lowprec.msamp.weight.Shards`).

    Args:
        mesh: what ``fully_shard`` got; its last dimension shards.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._dim = mesh.ndim - 1
        self._group = mesh.get_group(self._dim)
        self.rank = mesh.get_local_rank(self._dim)

    def maximum(self, values: Tensor) -> Tensor:
        """Over the ranks: (...) float32; a collective. NaN comes back as inf, which a maximum keeps."""
        largest = torch.where(values.isnan(), torch.inf, values)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest

    def to_dtensor(self, shard: Tensor, param: Tensor) -> Tensor:
        """A DTensor of which this rank has ``shard``, placed as ``param`` is."""
        assert isinstance(param, DTensor)
        make: Any = DTensor.from_local
        whole: Tensor = make(
            shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        return whole


@final
class PendingShards:
    """The coded weights of one model on their way into FSDP2; made by :func:`code_shards`."""

    def __init__(self, layers: Mapping[str, ScaledLinear]) -> None:
        self.layers = dict(layers)

    def collect(self, mesh: DeviceMesh) -> None:
        """After ``fully_shard`` over ``mesh``: let optimizers and state dicts find codes, masters and scales."""
        shards = MeshShards(mesh)
        for fqn, layer in self.layers.items():
            weight: Any = layer.weight
            shard = weight._local_tensor if isinstance(weight, DTensor) else None
            assert isinstance(shard, MsampShard), f"{fqn!r} was not sharded"
            scaled = shard.msamp_state
            scaled.master, scaled.shards = shard.master, shards
            scaled._param = weakref.ref(weight)
            weight.codes, weight.msamp_state = shard.codes, scaled


def code_shards(model: nn.Module, shards: int) -> PendingShards | None:
    """Make the weights of ScaledLinears ones that FSDP2 can shard; call before ``fully_shard``.

    Their Parameters are replaced, as ``fully_shard`` replaces all of them, and their gradients are float32.

    Args:
        model: with layers of :func:`~lightning_lowprec.msamp.linear.scale_linears`, at level O3; None comes
            back if it has none.
        shards: into how many parts each weight will be cut.

    Raises:
        ValueError: weights of another level, or one that does not divide into equal parts.
    """
    check_codes(model, shards)
    layers = scaled_linears(model)
    for layer in layers.values():
        scaled = cast(MsampWeightState, msamp_state_of(layer.weight))
        coded = MsampShard(layer.weight.detach(), scaled.master, scaled)
        layer.weight = nn.Parameter(coded, requires_grad=layer.weight.requires_grad)
        layer.float32_gradients = True
    return PendingShards(layers) if layers else None


def check_codes(model: nn.Module, shards: int) -> None:
    """Raise ValueError as :func:`code_shards` does."""
    for fqn, layer in scaled_linears(model).items():
        scaled = cast(MsampWeightState, msamp_state_of(layer.weight))
        if scaled.master is None:
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
    """Raise ValueError for options of sharding that do not go with weights that are kept as codes, or for meta weights.

    Args:
        options: the ``ShardOptions``.
        model: converted.
    """
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
