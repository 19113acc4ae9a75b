"""Translate Lightning's ``FSDPStrategy`` to FSDP2: the same choices, or an error that says what to write instead."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, wrap

from lightning_lowprec.fsdp2.options import Modules
from lightning_lowprec.private.either import both
from lightning_lowprec.private.either import fabric_strategies as fabric
from lightning_lowprec.private.either import trainer_strategies as trainer
from lightning_lowprec.private.fsdp2 import classes_of
from lightning_lowprec.private.lightning import fsdp_choices

FSDP1: Final = (fabric.FSDPStrategy, trainer.FSDPStrategy)
DROPPED: Final = ("backward_prefetch", "device_id", "forward_prefetch", "limit_all_gathers")
"""These options tune FSDP1's speed and memory. FSDP2 has no such options; the result of training is the same."""
_CARRIED: Final = ("state_dict_type", "process_group_backend", "timeout", "cluster_environment", "checkpoint_io")
"""Choices that have the same name and meaning in our strategies."""
_BY_HAND: Final = "shard everything, or shard by hand with `lightning_lowprec.parallelize`"
_NO_EQUAL: Final = {  # and the remedy
    "ignored_modules": _BY_HAND,
    "ignored_states": _BY_HAND,
    "param_init_fn": "give the modules a `reset_parameters()`, which is called where a model starts on meta",
    "process_group": "say how many copies there are with `replicate=`",
}


def translate(strategy: Any) -> dict[str, Any]:
    """Return the arguments of our strategies that mean the same as ``strategy``, and log them in one line."""
    if type(strategy) not in both(*FSDP1):
        derived = (
            " derives from FSDPStrategy, and what it changes is not known" if isinstance(strategy, both(*FSDP1)) else ""
        )
        raise TypeError(
            f"`{type(strategy).__name__}`{derived or ' is no FSDPStrategy'}, so it cannot become FSDP2. Derive from"
            " nothing: pass the choices themselves to `lightning_lowprec.FSDP2Strategy(...)` (in Fabric"
            " `FabricFSDP2Strategy`), or an `FSDPStrategy(...)` to `from_fsdp`."
        )
    choices = fsdp_choices(strategy, in_fabric=isinstance(strategy, both(fabric.FSDPStrategy)))
    own = {"accelerator": strategy.accelerator, "devices": strategy.parallel_devices}
    for name, value in {"precision": choices["precision"], **own}.items():
        if value is not None:
            raise ValueError(
                f"`FSDPStrategy` was given {value!r}; pass `{name}=` to Trainer or Fabric instead (a plugin by"
                " `plugins=`)."
            )
    fsdp, checkpointing = choices["fsdp"], choices["activation_checkpointing"] or {}
    policy = checkpointing.get("auto_wrap_policy")
    recomputed = _modules(policy, "activation_checkpointing_policy", "activation_checkpointing")
    if "check_fn" in checkpointing:  # Lightning's deprecated `activation_checkpointing`
        recomputed = _by_module(checkpointing["check_fn"])
    arguments = {
        **{name: choices.get(name) for name in _CARRIED},
        **_sharding(choices["sharding_strategy"].name, fsdp.get("device_mesh")),
        **_dtypes(choices["mixed_precision"]),
        "wrap": _modules(fsdp.get("auto_wrap_policy"), "auto_wrap_policy", "wrap"),
        "activation_checkpointing": recomputed,
        "cpu_offload": choices["cpu_offload"].offload_params or None,
        "sync_module_states": fsdp.get("sync_module_states") or None,
    }
    arguments = {name: value for name, value in arguments.items() if value is not None or name == "timeout"}
    shown = [f"{name}={_shown(value)}" for name, value in arguments.items() if name not in _CARRIED[1:]]
    line = f"FSDPStrategy became FSDP2Strategy({', '.join(shown)})"
    if "wrap" not in arguments:
        line += "; without an auto_wrap_policy, repeated blocks are gathered one by one"
    if dropped := _dropped(fsdp):
        line += f"; dropped, as FSDP2 has its own way: {', '.join(sorted(dropped))}"
    rank_zero_info(f"{line}.")
    return arguments


def _sharding(name: str, mesh: tuple[int, ...] | DeviceMesh | None) -> dict[str, Any]:
    if name == "NO_SHARD":
        raise ValueError("`sharding_strategy='NO_SHARD'` shards nothing; use `strategy='ddp'`.")
    hybrid, keep = "HYBRID" in name, name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    options: dict[str, Any] = {"reshard_after_forward": False} if keep else {}
    if mesh is None:
        return options | ({"replicate": "nodes"} if hybrid else {})
    if isinstance(mesh, DeviceMesh) and not torch.equal(mesh.mesh.flatten().cpu(), torch.arange(mesh.mesh.numel())):
        raise ValueError(
            f"`device_mesh={mesh}` orders the ranks in its own way; FSDP2 here takes them in their order. Use"
            " `replicate=`, or `lightning_lowprec.parallelize(model, mesh, plugin)` with your own mesh."
        )
    shape = mesh if isinstance(mesh, tuple) else tuple(mesh.mesh.shape)
    if len(shape) != (2 if hybrid else 1):
        raise ValueError(
            f"`device_mesh={mesh!r}` does not go with `sharding_strategy={name!r}`; a mesh (copies, shards) goes with"
            " 'HYBRID_SHARD', one of a single dimension with the others."
        )
    return options | {"replicate": shape[0] if hybrid else 1, "shards": shape[-1]}


def _dtypes(chosen: MixedPrecision | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    remedies = {
        "keep_low_precision_grads": "leave it out; 'bf16-master' keeps bf16 gradients (and float32 masters)",
        "_module_classes_to_ignore": "leave it out, or give these modules another `wrap` and no `param_dtype`",
    }
    for name, remedy in remedies.items():
        got, usual = getattr(chosen, name, None), getattr(MixedPrecision(), name, None)
        if got != usual:
            raise ValueError(f"`MixedPrecision({name}={got!r})` has no equal in FSDP2 (only {usual!r}): {remedy}.")
    return {
        "param_dtype": chosen.param_dtype,
        "reduce_dtype": chosen.reduce_dtype or chosen.param_dtype,  # as FSDP1 does
        "buffer_dtype": chosen.buffer_dtype,
    }


def _modules(policy: Any, argument: str, option: str) -> Modules | None:
    """Return classes, or a predicate of fqn and module, that choose the same modules as an FSDP1 policy."""
    if policy is None:
        return None
    remedy = f"pass classes or a function (fqn, module) -> bool by `{option}=`"
    keywords = getattr(policy, "keywords", {})
    function = policy.func if isinstance(policy, partial) else policy
    classes = classes_of(policy) if isinstance(policy, wrap.ModuleWrapPolicy) else policy
    if isinstance(classes, set):
        return tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))
    if function is wrap.transformer_auto_wrap_policy and "transformer_layer_cls" in keywords:
        return _modules(set(keywords["transformer_layer_cls"]), argument, option)
    if function is wrap.lambda_auto_wrap_policy and "lambda_fn" in keywords:
        return _by_module(keywords["lambda_fn"])
    if function is wrap.always_wrap_policy:
        return _by_module(lambda module: any(True for _ in module.parameters(recurse=False)))
    raise ValueError(
        f"`{argument}={policy!r}` has no equal in FSDP2, which does not ask a policy about sizes or where to descend;"
        f" {remedy}, or leave it out to gather the repeated blocks."
    )


def _by_module(function: Any) -> Modules:
    return lambda fqn, module: bool(function(module))


def _dropped(fsdp: Mapping[str, Any]) -> list[str]:
    translated = {*DROPPED, "auto_wrap_policy", "device_mesh", "sync_module_states", "use_orig_params"}
    for name, value in fsdp.items():
        if name not in translated and value is not None:
            raise ValueError(
                f"`FSDPStrategy({name}=...)` has no equal in FSDP2: {_NO_EQUAL.get(name, 'leave it out')}."
            )
    dropped = [name for name in DROPPED if name in fsdp]
    # True is Lightning's default, and the only way of FSDP2
    return dropped if fsdp.get("use_orig_params") is not False else [*dropped, "use_orig_params"]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(cls.__name__ for cls in value)}]"
    return getattr(value, "__name__", None) or repr(value)
