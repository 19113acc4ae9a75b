"""Private names of PyTorch that this package uses, by the part of the package that needs them."""

import functools
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_lowprec.extras import missing

Tensors = list[Tensor] | tuple[Tensor, ...]

MASTERS: Final = "float32 masters"
LOSS_SCALING: Final = "loss scaling"
MSAMP: Final = "MS-AMP"
TRANSFORMER_ENGINE: Final = "FP8TE"
FSDP2: Final = "'fsdp2'"
EXPORT: Final = "`lightning_lowprec.export` of a model that every rank has"
FSDP: Final = "torch.distributed.fsdp._fully_shard"
PARAM_GROUPS: Final = ("_fsdp_param_groups", "_fsdp_param_group")
"""Attributes of FSDPState: torch 2.11 has one group of parameters per module, later versions have a list."""
_OPTIMIZER_STEP: Final = (  # how optimizers, their step hooks and schedulers notice that a step was made
    "torch.optim.Optimizer().hooked",
    "torch.optim.lr_scheduler.LRScheduler()._opt_called",
    "torch.optim.lr_scheduler.LRScheduler()._wrapped_by_lr_sched",
)
NAMES: Final[dict[str, tuple[str, ...]]] = {
    MASTERS: (
        *_OPTIMIZER_STEP,
        "torch.optim.Optimizer()._optimizer_step_pre_hooks",
        "torch.optim.Optimizer()._optimizer_step_post_hooks",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch.Tensor._version",
        "torch.nn.Module._apply",
        "torch.nn.modules.batchnorm._NormBase",
    ),
    EXPORT: ("torch.distributed.distributed_c10d._get_default_store",),
    LOSS_SCALING: ("torch._foreach_mul_", "torch._amp_foreach_non_finite_check_and_unscale_"),
    MSAMP: (
        *_OPTIMIZER_STEP,
        "torch._scaled_mm",
        "torch._foreach_copy_",
        "torch._foreach_norm",
        "torch.ops.aten.copy_.default._schema",
        "torch._C._swap_tensor_impl",
        "torch.nn.Module._slow_forward",
        "torch.Tensor._backward_hooks",
        "torch.Tensor._post_accumulate_grad_hooks",
    ),
    FSDP2: (
        "torch._foreach_norm",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.ops.aten.copy_.default._schema",
        "torch.distributed.tensor.DTensor._local_tensor",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
        "torch.distributed.fsdp.wrap.ModuleWrapPolicy()._module_classes",
        f"{FSDP}._fsdp_common.TrainingState.PRE_BACKWARD",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup().device",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup().mesh_info",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup().modules",
        f"{FSDP}._fsdp_param_group.FSDPParamGroup().post_forward_mesh_info",
        f"{FSDP}._fsdp_state.FSDPState()._training_state",
        f"{FSDP}._fsdp_param.FSDPParam().all_gather_outputs",
        f"{FSDP}._fsdp_param.FSDPParam()._unsharded_param",
    ),
    TRANSFORMER_ENGINE: (
        "torch.Tensor._version",
        "torch._C._current_graph_task_id",
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "torch._foreach_copy_",
    ),
    "FP8 layers": (
        "torch._scaled_mm",
        "torch._scaled_grouped_mm",
        "torch._int_mm",
        "torch.compiler._is_exporting_flag",
        "torch.Tensor._version",
        "torch.utils._python_dispatch._get_current_dispatch_mode",
    ),
    "NumericsMonitor": ("torch.utils._python_dispatch._disable_current_modes", "torch.Tensor._base"),
    "compiled models": (
        "torch.nn.Module()._compiled_call_impl",
        "torch.nn.Module._slow_forward",
        "torch._dynamo.OptimizedModule()._orig_mod",
    ),
}
"""By part: the names whose absence is an error as soon as that part is set up; without what is read at import."""


def moved() -> list[str]:
    """Return the private names that the installed PyTorch no longer has, in words; empty on supported versions."""
    return [f"{name}, needed for {part}" for part in NAMES for name in _missing(part)]


def check(part: str) -> None:
    """Raise ImportError if PyTorch lacks a private name that ``part`` needs; called at set-up, before any step."""
    lost = _missing(part)
    if lost:
        raise ImportError(
            f"torch {torch.__version__} no longer has {', '.join(lost)}, needed for {part}. Install a torch that"
            " this version of lightning_lowprec supports."
        )


def _missing(part: str) -> list[str]:
    lost = missing(NAMES[part])
    groups = [f"{FSDP}._fsdp_state.FSDPState().{name}" for name in PARAM_GROUPS]
    if part == FSDP2 and missing(groups) == groups:
        lost.append(groups[0])
    return lost


# ---- many tensors in one call


def copy_all_(targets: Tensors, sources: Tensors) -> None:
    """Copy every source into its target, in place."""
    if targets:
        torch._foreach_copy_(targets, sources)


def multiply_all_(tensors: Tensors, factor: float | Tensor) -> None:
    """Multiply every tensor by ``factor``, in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def float32_norms(tensors: Tensors, order: float) -> Tensor:
    """Return the norm of every tensor, computed in float32: (len(tensors),).

    DTensors must have the same mesh and placements; the norms are those of all shards, in a sharded DTensor. Torch's
    function does not take them with a dtype from torch 2.14 on (pytorch#194033).
    """
    first = tensors[0]
    if not isinstance(first, DTensor):
        return torch.stack(torch._foreach_norm(tensors, order, dtype=torch.float32))
    norms = float32_norms([tensor.to_local() for tensor in tensors], order)  # type: ignore[attr-defined]
    placements = [Shard(0) if placement.is_shard() else placement for placement in first.placements]
    return DTensor.from_local(norms, first.device_mesh, placements, run_check=False)


def largest_absolute_values(tensors: Tensors) -> Tensor:
    """Return the largest absolute value of every tensor, NaN if there is one: (len(tensors),)."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))


def unscale_all_(grads: Tensors, inv_scale: float) -> Tensor:
    """Multiply gradients of one device and dtype, in place; return a scalar above 0 if one of them is not finite."""
    device = grads[0].device
    found_inf, factor = (torch.full((), x, dtype=torch.float32, device=device) for x in (0.0, inv_scale))
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, factor)
    return found_inf


# ---- tensors, modules and operations


def version_of(tensor: Tensor) -> int:
    """Return a count that grows with every in-place change of ``tensor``, except through ``tensor.data``."""
    return tensor._version


def fingerprints(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return values that change with every edit of a tensor, except in-place edits of ``tensor.data``."""
    return [(t._version, (t._local_tensor if isinstance(t, DTensor) else t).data_ptr()) for t in tensors]


def increment_versions(tensors: Sequence[Tensor]) -> None:
    """Note in-place changes that torch did not see: a graph that saved one of the tensors then raises."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


@functools.cache
def _write_positions(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def written_arguments(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """Return the arguments that the operation ``func`` writes to, for a ``__torch_dispatch__``."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_positions(func)]


def returned_in_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what an operation that writes returns: the arguments that the operation ``func`` writes to, or None."""
    written = written_arguments(func, args, kwargs) if func._schema.returns else [None]
    return written[0] if len(written) == 1 else tuple(written)


def inference_mode_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Leave inference mode if ``tensor`` is none of its tensors: torch wants a view to be of the kind of its base."""
    leaves = torch.is_inference_mode_enabled() and not tensor.is_inference()
    return torch.inference_mode(False) if leaves else nullcontext()


def swap_data(param: Tensor, made: Tensor) -> None:
    """Give the object ``param`` class, attributes and data of ``made``; the hooks on the gradient of ``param`` stay.

    ``torch.utils.swap_tensors`` loses these hooks, and refuses a parameter that has views or weak references. Both may
    stay here: views keep the old data, as with ``param.data = ...``, and the object is the same.
    """
    old: Any = param
    hooks, later_hooks = old._backward_hooks, old._post_accumulate_grad_hooks
    _release_failed_trace()
    if param.is_leaf and param.requires_grad:  # a graph of the old data would leave its gradient at the old data
        torch.autograd.graph.get_gradient_edge(param).node.register_prehook(_refuse_old_graph)
    old.__class__, made.__class__ = made.__class__, old.__class__
    old.__dict__, made.__dict__ = made.__dict__, old.__dict__
    torch._C._swap_tensor_impl(param, made)
    old._backward_hooks, old._post_accumulate_grad_hooks = hooks, later_hooks  # registers them with the data


def _release_failed_trace() -> None:
    """Clear the frames of the error that is being handled that keep a ``torch.jit.trace``, which torch refuses to swap.

    The trace has weak references to the parameters. Lightning calls ``teardown`` while it handles the error of a hook.
    """
    error = sys.exc_info()[1]
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is nn.Module._slow_forward.__code__:
                frame.clear()
        error = error.__context__


def _refuse_old_graph(gradients: object) -> None:
    raise RuntimeError(
        "this loss was computed before a parameter was converted or moved to another device (MS-AMP). Compute the loss"
        " again."
    )


# ---- FSDP2

MOVING_OPERATIONS: Final = (torch.ops.aten._to_copy.default, torch.ops.aten._pin_memory.default)
"""The operations that move a tensor to another device or into pinned memory."""
tree_leaves = torch.utils._pytree.tree_leaves
tree_map_only = torch.utils._pytree.tree_map_only


def tensors_of(values: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard that this rank has of a DTensor, or ``tensor`` itself if it is none.

    This is the stored object. ``DTensor.to_local()`` returns a view of it where gradients are recorded.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_tensor(local: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor with the shape and placements of ``like``, of which this rank has the shard ``local``.

    If ``like`` is no DTensor, return ``local`` itself.
    """
    if not isinstance(like, DTensor):
        return local
    return dtensor(local, like.device_mesh, like.placements, like.shape, like.stride())


def dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return a DTensor of which this rank has ``local``: the memory of ``local`` itself, on its device.

    ``DTensor.from_local`` copies shards in CPU memory (``cpu_offload``) to the device of the mesh.
    """
    shape = torch.Size(shape)
    if type(local) is Tensor and local.storage_offset():
        # copy.deepcopy of a DTensor takes one whose memory has an offset for one with memory of its own (torch 2.13)
        first = local.detach().as_strided(local.shape, local.stride(), 0)
        made = dtensor(first, mesh, placements, shape, stride)
        made._local_tensor = local.detach()
        return made
    if local.device.type == mesh.device_type or local.is_meta:
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tuple(stride))
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, tuple(stride), local.dtype))
    build: Any = DTensor
    sharded: DTensor = build(local, spec, requires_grad=False)
    return sharded


def first_element(tensor: Tensor) -> int:
    """Return the position of this rank's first element in the whole tensor, in the order of rows."""
    if not isinstance(tensor, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    position = 0
    for size, offset in zip(tensor.shape, offsets, strict=True):
        position = position * size + offset
    return position


# ---- MS-AMP: tensors of codes and their gradients


_aten = torch.ops.aten
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a tensor subclass that only has ``__torch_dispatch__``."""
ATEN_UNSCALE: Final = _aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operation of gradient scalers."""
ENCODER_LAYER: Final = (_aten._transformer_encoder_layer_fwd.default, _aten._native_multi_head_attention.default)
"""The operations by which torch's TransformerEncoderLayer and MultiheadAttention evaluate in one call."""
ATEN_FOREACH_COPY: Final = _aten._foreach_copy_.default
ATEN_FOREACH_NORM: Final = _aten._foreach_norm.Scalar
ATEN_FOREACH_ZERO: Final = _aten._foreach_zero_.default
ATEN_FOREACH_MULTIPLY: Final[tuple[object, ...]] = tuple(
    getattr(packet, numbers)
    for packet in (_aten._foreach_mul_, _aten._foreach_div_)
    for numbers in ("Scalar", "ScalarList", "Tensor")
)
_ignore_in_ddp: Any = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model


def ignore_in_ddp(model: nn.Module, names: set[str]) -> None:
    """Let DDP leave these parameters of ``model`` alone, and those that it was to leave alone already."""
    _ignore_in_ddp(model, sorted(names.union(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))))


def train_in_ddp(model: nn.Module, names: Collection[str]) -> None:
    """Undo :func:`ignore_in_ddp` for these parameters of ``model``."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", None)
    if before is None:
        return
    left = sorted(set(before).difference(names))
    _ignore_in_ddp(model, left)
    if not left:
        delattr(model, "_ddp_params_and_buffers_to_ignore")
    for name, parameter in model.named_parameters():
        if name in names:
            vars(parameter).pop("_ddp_ignored", None)


# ---- what runs around the caller


is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Return whether the caller runs under ``torch.jit.trace``; public, but without a type."""
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return whether the caller runs under ``torch.func``."""


def is_exporting() -> bool:
    """Return whether the caller runs under ``torch.export``.

    ``torch.compiler.is_exporting()`` says so in every ``torch.compile`` of torch 2.11; later versions answer from the
    same flag. Remove with torch 2.11.
    """
    return torch.compiler._is_exporting_flag


def outside_of_checkpoints() -> AbstractContextManager[object]:
    """Return a context for operations that a selective checkpoint must not count: it would count others in backward."""
    mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    if mode is None or not type(mode).__module__.startswith("torch.utils.checkpoint"):
        return nullcontext()
    return torch.utils._python_dispatch._disable_current_modes()


def is_in_backward() -> bool:
    """Return whether the caller runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks on all saved tensors are active, as inside a checkpoint that is not reentrant."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# ---- products of codes

# ``torch.nn.functional.scaled_mm`` calls another operation, ``aten._scaled_mm_v2``. The partitioner does not count it
# among the products that a backward must not compute again, torch's counter knows no FLOPs of it, and DTensor has no
# rule for it: so it is in 2.11.0, 2.13.0, 2.14.1 and 2.15.0. Use the public function from the version on in which that
# has changed (``_functorch/partitioners.py``, ``utils/flop_counter.py``, ``distributed/tensor/_ops/_matrix_ops.py``).


def scaled_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """[M, K] @ [K, N] of float8 codes, times reciprocals of scales ([M, 1] and [1, N], or one each) -> [M, N].

    ``b`` lies in memory column by column. ``fast``: the sum may have fewer bits than float32.
    """
    return torch._scaled_mm(a, b, scale_a=inverse_a, scale_b=inverse_b, out_dtype=dtype, use_fast_accum=fast)


def block_product(
    a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, dtype: torch.dtype, *, of_tiles: bool
) -> Tensor:
    """[M, K] @ [K, N] of float8_e4m3fn codes with a scale per block of 128 -> [M, N], by cuBLASLt on Hopper.

    Reciprocals of scales, which lie in memory column by column: ``inverse_a`` is [M, ceil(K / 128)], ``inverse_b`` is
    the same of N, or those of tiles, [ceil(K / 128), ceil(N / 128)] with rows filled up to a multiple of 4.
    """
    kinds = F.ScalingType
    kind = kinds.BlockWise128x128 if of_tiles else kinds.BlockWise1x128
    product: Tensor = F.scaled_mm(a, b, inverse_a, kinds.BlockWise1x128, inverse_b, kind, output_dtype=dtype)
    return product


def scaled_grouped_mm(a: Tensor, b: Tensor, inverse_a: Tensor, inverse_b: Tensor, ends: Tensor) -> Tensor:
    """Grouped product of float8_e4m3fn codes with a scale per row and column -> bf16, on Hopper and Blackwell.

    ``torch.nn.functional.scaled_grouped_mm`` does the same, and torch 2.11 cannot compile it. ``a``: [M, K],
    contiguous; ``b``: [E, K, N], or [K, N] if the groups are parts of K, contiguous along K; what to multiply with,
    ``inverse_a``: [M] or [E * M], ``inverse_b``: [E, N] or [E * N]; ``ends``: [E] int32.
    """
    return torch._scaled_grouped_mm(a, b, inverse_a, inverse_b, ends, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] @ [K, N] of int8 -> [M, N] int32."""
    return torch._int_mm(a, b)
