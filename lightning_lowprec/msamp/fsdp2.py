"""Weights of codes under FSDP2 (MS-AMP's O3): e4m3 codes are gathered, one byte per element.

    scale_linears(model, fqns, "O3")
    code_shards(model, shards=mesh.size())     # before fully_shard
    fully_shard(model, mesh=mesh)
    collect(model, mesh)                       # after fully_shard, before the optimizer
    optimizer = ScaledAdamW(model.parameters(), level="O3")

``code_shards`` makes a MsampShard of all codes and the master. ``fully_shard`` cuts both. FSDP2 gathers the codes, into
a MsampShard without a master. The optimizer steps the codes and the master of this rank.

FSDP2 knows float32 and bf16 parameters, so a MsampShard looks like a float32 tensor. The scale belongs to the whole
weight, and every rank has it. With ``param_dtype=bfloat16`` FSDP2 rounds gradients to bf16 before it reduces them. A
step takes one all-reduce for its new scales (per 16 million elements and group of parameters). State dicts have float32
DTensors, so they fit any number of ranks; loading a state dict is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.msamp.linear import scaled_linears
from lightning_lowprec.msamp.weight import MsampWeightState, Shards, required_state_of, values_of
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.scaling import saturating_cast
from lightning_lowprec.private import torch as private

_aten: Any = torch.ops.aten
_CUT: Final = {  # the operations by which FSDP2 makes, moves and aliases shards
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.as_strided.default,
    _aten.split.Tensor,
    _aten.clone.default,
    *private.MOVING_OPERATIONS,
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
        like_codes = {"strides": codes.stride(), "storage_offset": codes.storage_offset(), "device": codes.device}
        shard: MsampShard = private.make_wrapper_subclass(cls, codes.size(), dtype=dtype, **like_codes)
        shard.codes, shard.master, shard.msamp_state = codes, master, state
        return shard

    __torch_function__ = private.disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Cut, move and copy codes and master; let other operations read the values; refuse other writes."""
        kwargs = kwargs or {}
        if func in _CUT:
            return _cut(func, args, kwargs)
        if func is _aten.copy_.default and isinstance(args[0], MsampShard):
            return _copy_(args[0], args[1])
        if any(isinstance(t, MsampShard) for t in private.tree_leaves(private.written_arguments(func, args, kwargs))):
            raise RuntimeError(f"{func} would write to a weight that is kept as codes with a scale; use `set_values_`.")
        return func(*private.tree_map_only(MsampShard, values_of, args), **kwargs)

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
        return func(values_of(first), *args[1:], **kwargs)
    kept = {name: value for name, value in kwargs.items() if name != "dtype"}
    codes = func(first.codes, *args[1:], **kept)
    masters = None if first.master is None else func(first.master, *args[1:], **kept)
    if isinstance(codes, Tensor):
        return MsampShard(codes, masters, first.msamp_state, first.dtype)
    masters = [None] * len(codes) if masters is None else masters
    return [MsampShard(c, m, first.msamp_state, first.dtype) for c, m in zip(codes, masters, strict=True)]


def _copy_(target: MsampShard, source: Tensor) -> MsampShard:
    """Copy codes and master; encode values with the present scale, which ``set_values_`` makes fit afterwards."""
    if not isinstance(source, MsampShard):
        target.codes.copy_(saturating_cast(source.float() * target.msamp_state.scale, E4M3))
        return target
    target.codes.copy_(source.codes)
    if target.master is not None and source.master is not None:
        target.master.copy_(source.master)
    return target


def code_shards(model: nn.Module, shards: int) -> None:
    """Make the weights of ScaledLinears shardable by FSDP2; call before ``fully_shard``.

    New Parameters replace the weights, as ``fully_shard`` replaces all Parameters. Gradients become float32.

    Args:
        model: with layers of :func:`~lightning_lowprec.msamp.linear.scale_linears` at level O3.
        shards: the number of parts that each weight will be cut into.

    Raises:
        ValueError: weights of another level, or a weight that does not divide into equal parts.
    """
    layers = scaled_linears(model)
    for fqn, layer in layers.items():
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
    for layer in layers.values():
        state = required_state_of(layer.weight)
        shard = MsampShard(layer.weight.detach(), state.master, state)
        layer.weight = nn.Parameter(shard, requires_grad=layer.weight.requires_grad)
        layer.float32_gradients = True


@torch.no_grad()
def collect(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let optimizers and state dicts find codes, masters and scales; call after ``fully_shard`` over ``mesh``."""
    shards = Shards(mesh)
    for fqn, layer in scaled_linears(model).items():
        weight: Any = layer.weight
        shard = local(weight)
        assert shard is not weight, f"{fqn!r} was not sharded"
        assert isinstance(shard, MsampShard)
        state = shard.msamp_state
        state.master, state.shards = shard.master, shards
        weight.codes = shard.codes
        state.bind(weight)


def check_options(options: Any, model: nn.Module) -> None:
    """Raise ValueError for ``ShardOptions``, or a model on meta, that do not go with weights of codes."""
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
