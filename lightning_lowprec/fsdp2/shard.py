"""Sharding a converted model by FSDP2, in the one order that works.

    (convert) -> float8 weights -> tensor parallel -> activation checkpointing -> compile -> fully_shard -> weights

Conversion after ``fully_shard`` would mix tensors and DTensors; compiling before checkpointing would trace the wrong
function. Everything happens in place: module objects and fqns stay, parameters are replaced by DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.conversion import backends
from lightning_lowprec.fsdp2 import meshes
from lightning_lowprec.fsdp2.checks import check_model, check_shared
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.traffic import Wire
from lightning_lowprec.fsdp2.visits import Visits, guard
from lightning_lowprec.fsdp2.weights import cast_buffers, fill, full_values, origin, send_all
from lightning_lowprec.fsdp2.wrapping import chosen

if TYPE_CHECKING:
    from lightning_lowprec.fsdp2.fp8_gather import GatherScales


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """What sharding has made of a model."""

    groups: Mapping[str, FSDPModule]
    """By fqn: what is gathered as one; the root is ``""``."""
    wire: Wire
    """What goes over the wire."""
    scales: GatherScales | None
    """Of the weights that are gathered as float8."""
    visits: Visits
    """What computes it just now."""


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    *,
    device: torch.device,
    param_dtype: torch.dtype | None,
    fp8_all_gather: bool,
    methods: tuple[str, ...] = (),
) -> Sharded:
    """Shard ``model`` in place.

    Args:
        model: converted, on any device, on meta, or on meta on all ranks but 0.
        mesh: see :func:`~lightning_lowprec.fsdp2.meshes.make_mesh`.
        options: what the user chose.
        device: what this rank computes on.
        param_dtype: what weights are gathered as and computed in, unless ``options`` says otherwise.
        fp8_all_gather: gather the weights of FP8 layers as float8.
        methods: names of methods that compute without calling the module itself.

    Raises:
        ValueError: options that do not fit the model, such as a wrap that matches nothing, or shards of unequal size.
        TypeError: a model that is sharded already.
    """
    check_model(model)
    wrapped = chosen(model, options.wrap, "wrap")
    check_shared(model, wrapped)
    data_mesh, tensor = meshes.shard_mesh(mesh), meshes.tensor_mesh(mesh)
    if fp8_all_gather:
        _check_even(model, data_mesh)  # before the first collective, which is in `origin`
    shard_codes = [b.shard_codes for b in backends.registered() if b.shard_codes is not None and b.coded_weight(model)]
    after_sharding = [prepare(model, data_mesh.size(data_mesh.ndim - 1), options) for prepare in shard_codes]
    source = origin(model)
    if options.sync_module_states and source == "every rank":
        send_all(model, device)
    values = full_values(model) if source == "rank 0" and torch.distributed.get_rank() == 0 else None
    scales = _gather_in_fp8(model, data_mesh) if fp8_all_gather else None
    if tensor is not None:
        _parallelize(model, tensor, options)
    _checkpoint(model, wrapped, options)
    if options.compile is not False:
        for module in wrapped.values() or [model]:
            module.compile(**(options.compile if isinstance(options.compile, Mapping) else {}))
    groups = _fully_shard(model, wrapped, data_mesh, options, param_dtype, device)
    fill(model, torch.device("cpu") if options.cpu_offload else device, source, values)
    if options.buffer_dtype is not None:
        cast_buffers(model, options.buffer_dtype)
    if scales is not None:
        scales.collect(model)
    for finish in after_sharding:
        finish(data_mesh)
    visits = guard(model, scales, methods)
    return Sharded(groups=groups, wire=Wire(groups, options.param_dtype or param_dtype), scales=scales, visits=visits)


def _check_even(model: nn.Module, mesh: DeviceMesh) -> None:
    from lightning_lowprec.fsdp2.fp8_gather import check_even

    check_even(model, shards=mesh.size(mesh.ndim - 1))


def _gather_in_fp8(model: nn.Module, mesh: DeviceMesh) -> GatherScales | None:
    from lightning_lowprec.fsdp2.fp8_gather import gather_in_fp8  # imports torchao, which takes seconds

    return gather_in_fp8(model, shards=mesh.size(mesh.ndim - 1))


def _parallelize(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> None:
    if isinstance(options.tensor_parallel, Mapping):
        parallelize_module(model, mesh, dict(options.tensor_parallel))
    elif options.tensor_parallel is not None:
        options.tensor_parallel(model, mesh)
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(f"`tensor_parallel={options.tensor_parallel!r}` left every parameter as it was.")
    for fqn, module in model.named_modules():
        backend = backends.owner(module)
        cut = any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
        if backend is not None and not backend.cuts_layers and cut:
            raise ValueError(
                f"`tensor_parallel` cuts {fqn!r}, a layer of {backend.title}, whose kernels take no DTensors. Use"
                " torchao ('fp8-tensorwise'), or keep what is cut out of FP8 (`FP8TE(keep=[...])`)."
            )


def _checkpoint(model: nn.Module, wrapped: Mapping[str, nn.Module], options: ShardOptions) -> None:
    if options.activation_checkpointing is False:
        return
    if options.activation_checkpointing is True:
        modules = dict(wrapped)
        if not modules:
            raise ValueError(
                f"`activation_checkpointing=True` takes the modules of `wrap`, and `wrap={options.wrap!r}` found no"
                f" repeated blocks in {type(model).__name__}; name classes in `activation_checkpointing` or in `wrap`."
            )
    else:
        modules = chosen(model, options.activation_checkpointing, "activation_checkpointing")
    for module in modules.values():  # an instance attribute keeps every fqn, which a wrapping module does not
        module.forward = partial(_recomputed, _checkpoint_for(module), module.forward)


def _checkpoint_for(module: nn.Module) -> Any:
    """The checkpoint function of the backend whose layers the block has, which may restore their state; else torch's."""
    for backend in backends.registered():
        if backend.checkpoint is not None and any(backend.owns(m) for m in module.modules()):
            return backend.checkpoint()
    return checkpoint


def _recomputed(recompute: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return recompute(forward, *args, use_reentrant=False, **kwargs)


def _fully_shard(
    model: nn.Module,
    wrapped: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    options: ShardOptions,
    param_dtype: torch.dtype | None,
    device: torch.device,
) -> dict[str, FSDPModule]:
    dtypes: dict[str, Any] = {
        "param_dtype": options.param_dtype or param_dtype,
        "reduce_dtype": options.reduce_dtype or torch.float32,
    }
    # the root's own inputs are the user's batch, targets included: autocast and the plugin see to them
    root = MixedPrecisionPolicy(**dtypes, output_dtype=options.output_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy()
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": offload,
        "reshard_after_forward": options.reshard_after_forward,
    }
    norms = _batch_norms(model, wrapped) if dtypes["param_dtype"] is not None else {}
    for norm in norms.values():  # float32, like their running statistics; a group has one dtype
        policy = MixedPrecisionPolicy(reduce_dtype=dtypes["reduce_dtype"], cast_forward_inputs=False)
        fully_shard(norm, mp_policy=policy, **arguments)
    for fqn in sorted(wrapped, key=lambda fqn: fqn.count("."), reverse=True):  # inner groups first
        fully_shard(wrapped[fqn], mp_policy=MixedPrecisionPolicy(**dtypes), **arguments)
    fully_shard(model, mp_policy=root, **arguments)
    return {fqn: cast(FSDPModule, module) for fqn, module in {**norms, **wrapped, "": model}.items()}


def _batch_norms(model: nn.Module, wrapped: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    norms = {fqn: module for fqn, module in model.named_modules() if isinstance(module, _BatchNorm)}
    return {fqn: norm for fqn, norm in norms.items() if fqn and fqn not in wrapped and list(norm.parameters())}


def is_sharded(model: nn.Module) -> bool:
    """Whether a part of ``model`` is under FSDP2, or holds DTensors."""
    tensors: list[Tensor] = list(model.parameters())
    return any(isinstance(t, DTensor) for t in tensors) or any(isinstance(m, FSDPModule) for m in model.modules())
