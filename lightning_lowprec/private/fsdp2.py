"""Private names of torch's FSDP2, its checkpoints and process groups; `torch.py` has the list of these names."""

from contextlib import AbstractContextManager
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_lowprec.extras import missing, replaced
from lightning_lowprec.private.torch import EXPORT, FSDP, PARAM_GROUPS, check


def reset_shards(module: nn.Module) -> None:
    """Let FSDP2 take the current parameters of ``module`` as its shards."""
    module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def without_root_hooks(module: nn.Module) -> AbstractContextManager[None]:
    """Let FSDP2 take the forward of the root ``module`` for a part of a forward pass that is under way.

    FSDP2 gathers the root's weights if they are not gathered, as if a checkpoint recomputed the forward.
    """
    state = cast(FSDPModule, module)._get_fsdp_state()
    return replaced(state, "_training_state", type(state._training_state).PRE_BACKWARD)


def gathered_parameters(module: nn.Module) -> list[Any]:
    """Return FSDP2's record of each parameter that ``module`` gathers."""
    return [record for group in _parameter_groups(module) for record in group.fsdp_params]


def _parameter_groups(module: nn.Module) -> list[Any]:
    state = cast(FSDPModule, module)._get_fsdp_state()
    many, one = PARAM_GROUPS
    groups = getattr(state, many) if hasattr(state, many) else [getattr(state, one)]
    return [group for group in groups if group is not None]


def has_several_groups() -> bool:
    """Return whether a module can gather several groups of parameters: not in torch 2.11."""
    return not missing([f"{FSDP}._fsdp_state.FSDPState().{PARAM_GROUPS[0]}"])


def add_group(
    module: nn.Module, params: list[nn.Parameter], policy: MixedPrecisionPolicy, offload: OffloadPolicy
) -> None:
    """Let a sharded ``module`` gather and reduce ``params``, which are not sharded yet, as a second group."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    state = cast(FSDPModule, module)._get_fsdp_state()
    first = _parameter_groups(module)[0]
    for p in [p for p in params if not p.is_meta]:
        p.data = p.data.to(first.device)
    meshes = first.mesh_info, first.post_forward_mesh_info
    state._fsdp_param_groups.append(FSDPParamGroup(params, first.modules, *meshes, first.device, None, policy, offload))


def unreduced_gradient(record: object) -> Tensor | None:
    """Return the gradient of a gathered parameter that waits for its reduction, or None."""
    gathered: nn.Parameter | None = vars(record).get("_unsharded_param")
    return None if gathered is None else gathered.grad


def classes_of(policy: ModuleWrapPolicy) -> set[type[nn.Module]]:
    """Return the classes that a ``ModuleWrapPolicy`` of FSDP1 wraps."""
    return policy._module_classes


def default_store() -> Any:
    """Return the key-value store by which the ranks of the default process group found each other."""
    from torch.distributed import distributed_c10d

    check(EXPORT)
    return distributed_c10d._get_default_store()
