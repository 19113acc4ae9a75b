"""Shard a converted model by FSDP2, in the one order that works.

    (convert) -> float8 weights -> tensor parallel -> activation checkpointing -> compile -> fully_shard -> weights

Conversion after ``fully_shard`` would mix tensors and DTensors; compiling before checkpointing would trace the wrong
function. Everything happens in place: module objects and fqns stay, parameters are replaced by DTensors.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.checkpoints.agreement import gathered
from lightning_lowprec.conversion import backends
from lightning_lowprec.fsdp2.forward_hooks import install_hooks
from lightning_lowprec.fsdp2.fp8_gather import check_even, gather_in_fp8
from lightning_lowprec.fsdp2.meshes import shard_mesh, tensor_mesh
from lightning_lowprec.fsdp2.options import ShardOptions, chosen
from lightning_lowprec.messages import warn
from lightning_lowprec.private.fsdp2 import add_group, has_several_groups
from lightning_lowprec.private.torch_modules import (
    compile_in_place,
    is_batch_or_instance_norm,
    is_compiled,
    is_of_torch,
)
from lightning_lowprec.private.transformers import has_cache, train_without_cache

Origin = Literal["every rank", "rank 0", "nowhere"]
_SHARDED_TYPES: Final = (FSDPModule, DTensor)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    *,
    device: torch.device,
    param_dtype: torch.dtype | None,
    fp8_all_gather: bool,
    methods: tuple[str, ...] = (),
    float32: Collection[str] = (),
) -> None:
    """Shard a converted ``model`` in place; it may be on meta, or on meta on all ranks but 0.

    Choices of the user in ``options`` come before ``param_dtype``. The ``methods`` compute without calling the module.
    Parameters and buffers whose fqns are in ``float32`` are gathered as float32 and are not cast.
    """
    check_model(model)
    wrapped = chosen(model, options.wrap, "wrap")
    check_shared(model, wrapped)
    data_mesh, tensor = shard_mesh(mesh), tensor_mesh(mesh)
    shards = data_mesh.size(data_mesh.ndim - 1)
    if fp8_all_gather:
        check_even(model, shards)  # before the first collective, which is in `origin`
    prepares = [b.shard_codes for b in backends.registered() if b.shard_codes is not None and b.coded_weight(model)]
    after_sharding = [prepare(model, shards, options) for prepare in prepares]
    source = origin(model)
    if options.sync_module_states and source == "every rank":
        with torch.no_grad():
            for weight in (*model.parameters(), *model.buffers()):
                sent = weight.detach().to(device).contiguous()  # the process group's device
                dist.broadcast(sent, src=0)
                weight.copy_(sent)
    values = model.state_dict() if source == "rank 0" and dist.get_rank() == 0 else {}
    scales = gather_in_fp8(model) if fp8_all_gather else None
    if tensor is not None:
        _parallelize(model, tensor, options)
    _checkpoint(model, wrapped, options)
    if options.compile is not False:
        unless = has_cache if train_without_cache(model) else None
        for module in wrapped.values() or [model]:
            compile_in_place(module, options.compile if isinstance(options.compile, Mapping) else {}, unless=unless)
    for module in [m for m in model.modules() if is_compiled(m) and is_of_torch(m)]:
        # FSDP2's hooks end a graph, and the compiler begins the next one at no function of torch: let it begin at ours
        module.forward = partial(_run, module.forward)
    _fully_shard(model, wrapped, data_mesh, options, param_dtype, device, float32)
    fill(model, torch.device("cpu") if options.cpu_offload else device, source, values)
    if options.buffer_dtype is not None:
        for fqn, buffer in model.named_buffers():
            if buffer.is_floating_point() and fqn not in float32:
                buffer.data = buffer.data.to(options.buffer_dtype)
    if scales is not None:
        scales.collect(model)
    for finish in after_sharding:
        finish(data_mesh)
    install_hooks(model, scales, options.output_dtype, methods)


def check_model(model: nn.Module) -> None:
    """Raise TypeError if ``model`` is wrapped by FSDP1, or sharded already; ValueError for scalar parameters."""
    wrapped = [fqn for fqn, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    if wrapped:
        raise TypeError(
            f"{wrapped[0] or type(model).__name__!r} is wrapped by `FullyShardedDataParallel` (FSDP1), which does not"
            " mix with FSDP2. Leave the wrapping to the strategy (`wrap=` says what is gathered as one)."
        )
    sharded = [
        fqn for fqn, part in (*model.named_modules(), *model.named_parameters()) if isinstance(part, _SHARDED_TYPES)
    ]
    if sharded:
        raise TypeError(
            f"{type(model).__name__} is sharded already ({sharded[0] or 'the model itself'!r}), so it can no longer be"
            " converted. Leave sharding to the strategy, or keep `ModelParallelStrategy` and call"
            " `lightning_lowprec.parallelize(model, mesh, plugin)` where you shard. For FSDP2 and expert parallelism,"
            " cut the experts by `tensor_parallel=`, a function that calls transformers' `apply_expert_parallelism`."
        )
    scalars = [fqn for fqn, p in model.named_parameters() if p.ndim == 0]  # FSDP2 cuts the first dimension
    if scalars:
        raise ValueError(
            f"FSDP2 cannot shard scalar parameters (of shape ()), and the model has {', '.join(map(repr, scalars))}."
            f" Give them one element before Trainer or Fabric get the model: `model.{scalars[0]} ="
            f" nn.Parameter(model.{scalars[0]}.detach().reshape(1))`. The model then computes the same."
        )


def check_shared(model: nn.Module, wrapped: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a wrapped module shares a parameter with a module outside of it: FSDP2 would untie them."""
    names: dict[int, list[str]] = {}
    for fqn, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(fqn)
    for fqns in names.values():
        groups = {max((g for g in wrapped if fqn.startswith(f"{g}.")), key=len, default="") for fqn in fqns}
        if len(groups) > 1:
            raise ValueError(
                f"{' and '.join(fqns)} are one parameter, but would be gathered with different modules"
                f" ({' and '.join(repr(g or 'the root') for g in sorted(groups))}), which unties them. Choose `wrap` so"
                " that both lie in one."
            )


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
        if cut and backend is not None and not backend.cuts(module):
            raise ValueError(
                f"`tensor_parallel` cuts {fqn!r}, a layer of {backend.title} whose kernels take no DTensors. Use"
                " 'fp8-hybrid', or keep what is cut in high precision (`keep=[...]`)."
            )


def _checkpoint(model: nn.Module, wrapped: Mapping[str, nn.Module], options: ShardOptions) -> None:
    choice = options.activation_checkpointing
    if choice is False:
        return
    modules = wrapped if choice is True else chosen(model, choice, "activation_checkpointing")
    if not modules:
        raise ValueError(
            f"`activation_checkpointing=True` takes the modules of `wrap`, and `wrap={options.wrap!r}` found no"
            f" repeated blocks in {type(model).__name__}; name classes in `activation_checkpointing` or in `wrap`."
        )
    for module in modules.values():
        functions = [b.checkpoint for b in backends.registered() if b.checkpoint and any(map(b.owns, module.modules()))]
        recompute = functions[0]() if functions else checkpoint  # a backend's function may restore state
        # an attribute of the instance keeps every fqn; a wrapping module would not
        module.forward = partial(_recomputed, recompute, module.forward)


def _run(forward: Any, *args: object, **kwargs: object) -> Any:
    return forward(*args, **kwargs)


def _recomputed(recompute: Any, forward: Any, *args: object, **kwargs: object) -> Any:
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
    float32: Collection[str],
) -> None:
    dtypes: dict[str, Any] = {
        "param_dtype": options.param_dtype or param_dtype,
        "reduce_dtype": options.reduce_dtype or torch.float32,
    }
    apart = _kept_apart(model, float32, dtypes["param_dtype"])
    shard_group = partial(
        _shard_group,
        apart=apart,
        mesh=mesh,
        offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu") if options.cpu_offload else OffloadPolicy(),
        reshard_after_forward=options.reshard_after_forward,
    )
    # batch and instance norms stay float32, like their statistics: one group each
    statistics = MixedPrecisionPolicy(reduce_dtype=dtypes["reduce_dtype"], cast_forward_inputs=False)
    for fqn, module in model.named_modules() if dtypes["param_dtype"] is not None else ():
        if fqn and fqn not in wrapped and is_batch_or_instance_norm(module) and list(module.parameters()):
            shard_group(module, mp_policy=statistics)
    inner = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=not apart)  # what float32 parameters compute stays so
    for fqn in sorted(wrapped, key=lambda fqn: fqn.count("."), reverse=True):  # inner groups first
        shard_group(wrapped[fqn], mp_policy=inner)
    # the inputs of the root are the user's batch with its targets: autocast and the plugin cast what needs it
    root = MixedPrecisionPolicy(**dtypes, output_dtype=options.output_dtype, cast_forward_inputs=False)
    shard_group(model, mp_policy=root)


def _kept_apart(model: nn.Module, float32: Collection[str], param_dtype: torch.dtype | None) -> set[nn.Parameter]:
    """Return the parameters that are gathered as float32 beside others; warn if this torch cannot do so."""
    named = model.named_parameters(remove_duplicate=False)
    apart = {p for fqn, p in named if fqn in float32 and param_dtype not in (None, p.dtype)}
    if apart and not has_several_groups():
        warn(
            f"fsdp2: {len(apart)} parameters that are to stay float32 are gathered as {param_dtype}, because torch"
            f" {torch.__version__} gathers all parameters of a module in one dtype. torch 2.12 and later keep them."
        )
        return set()
    return apart


def _shard_group(
    module: nn.Module,
    *,
    apart: set[nn.Parameter],
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    **options: Any,
) -> None:
    """Shard one group of parameters, and those that are kept ``apart`` as a second group of the same module."""
    inner = {p for part in module.modules() if isinstance(part, FSDPModule) for p in part.parameters()}
    kept = [p for p in module.parameters() if p in apart]
    in_float32 = replace(mp_policy, param_dtype=None)
    if kept and all(p in apart or p in inner for p in module.parameters()):
        fully_shard(module, mp_policy=in_float32, offload_policy=offload_policy, **options)
        return
    fully_shard(module, mp_policy=mp_policy, offload_policy=offload_policy, ignored_params=set(kept) or None, **options)
    if kept:
        add_group(module, kept, in_float32, offload_policy)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a part of ``model`` is under FSDP2, or holds DTensors."""
    return any(isinstance(part, _SHARDED_TYPES) for part in (*model.modules(), *model.parameters()))


# ---- the weights, which every rank has, only rank 0 has, or no rank has (meta device)


def origin(model: nn.Module) -> Origin:
    """Return which ranks have the weights; the answer is the same on all ranks."""
    tensors = [*model.parameters(), *model.buffers()]
    on_meta = sum(t.is_meta for t in tensors)
    everyone = gathered("meta" if tensors and on_meta == len(tensors) else "mixed" if on_meta else "real")
    if set(everyone) in ({"real"}, {"meta"}):
        return "every rank" if everyone[0] == "real" else "nowhere"
    if everyone[0] == "real" and set(everyone[1:]) == {"meta"}:
        return "rank 0"
    raise RuntimeError(
        f"{type(model).__name__} has {on_meta} of {len(tensors)} parameters and buffers on the meta device here, and"
        f" the ranks have: {', '.join(everyone)}. Build it on meta everywhere, on a real device everywhere, or on a"
        " real device on rank 0 and on meta on all others."
    )


def fill(model: nn.Module, device: torch.device, source: Origin, values: dict[str, Any]) -> None:
    """Give a sharded model its weights: the ``values`` of rank 0, or those that its modules initialise themselves."""
    if source == "every rank":
        return
    tensors_of = {m: [*m.parameters(recurse=False), *m.buffers(recurse=False)] for m in model.modules()}
    initialised: list[Any] = [m for m, tensors in tensors_of.items() if tensors and source == "nowhere"]
    unable = sorted({type(m).__name__ for m in initialised if not hasattr(m, "reset_parameters")})
    if unable:
        raise RuntimeError(
            f"{type(model).__name__} is on the meta device, and {', '.join(unable)} have parameters or buffers but no"
            " `reset_parameters()` to initialise them. Give them one, or load the weights on rank 0 (on meta on all"
            " others), from where they are sent."
        )
    if any(tensor.is_meta for tensors in tensors_of.values() for tensor in tensors):
        model.to_empty(device=device)
    if source == "rank 0":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)
        set_model_state_dict(model, values, options=options)
        persistent = set(model.state_dict())
        for fqn, buffer in model.named_buffers():  # those that no state dict holds, such as rotary tables
            if fqn not in persistent and not isinstance(buffer, DTensor):
                dist.broadcast(buffer, src=0)
    for module in initialised:
        module.reset_parameters()
