"""What Lightning's ``FSDPStrategy`` means in FSDP2: the same choice, or an error that says what to write instead.

The names of its private parts that are read here are checked first, as in :mod:`~lightning_lowprec.fsdp2.lightning_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import lightning
import torch
from lightning.fabric import strategies as fabric
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import strategies as trainer
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision

from lightning_lowprec.fsdp2.policies import classes_or_predicate

FSDP1: Final = (fabric.FSDPStrategy, trainer.FSDPStrategy)
NAMES: Final = (
    *("_accelerator", "_activation_checkpointing_kwargs", "_parallel_devices", "_process_group_backend"),
    *("_state_dict_type", "_timeout", "cluster_environment", "cpu_offload", "mixed_precision", "sharding_strategy"),
)
FABRIC_NAMES: Final = ("_fsdp_kwargs", "_precision")
TRAINER_NAMES: Final = ("_checkpoint_io", "_precision_plugin", "kwargs")

DROPPED: Final = ("backward_prefetch", "device_id", "forward_prefetch", "limit_all_gathers")
"""They tune FSDP1's speed and memory; FSDP2 has its own way, and the result of training is the same."""
_NO_EQUAL: Final = {
    "ignored_modules": "shard everything, or shard by hand with `lightning_lowprec.parallelize`",
    "ignored_states": "shard everything, or shard by hand with `lightning_lowprec.parallelize`",
    "param_init_fn": "give the modules a `reset_parameters()`, which is called where a model starts on meta",
    "process_group": "say how many copies there are with `replicate=`",
}


def check_names(strategy: Any) -> None:
    """Raise ImportError if this Lightning's FSDPStrategy lacks a name that is read here."""
    flavour = FABRIC_NAMES if isinstance(strategy, fabric.FSDPStrategy) else TRAINER_NAMES
    missing = [name for name in (*NAMES, *flavour) if not hasattr(strategy, name)]
    if missing:
        raise ImportError(
            f"lightning {lightning.__version__} has moved {', '.join(missing)} of FSDPStrategy, so it cannot be"
            " translated; write `lightning_lowprec.FSDP2Strategy(...)` (in Fabric `FabricFSDP2Strategy`) instead."
            " lightning_lowprec is tested with lightning 2.5.0 to 2.6."
        )


def translate(strategy: Any) -> dict[str, Any]:
    """The arguments of ours that mean what ``strategy`` says; one log line tells what became of it.

    Args:
        strategy: an ``FSDPStrategy`` of the Trainer or of Fabric, not set up yet.

    Raises:
        TypeError: no ``FSDPStrategy``, or a class derived from it.
        ValueError: a choice that FSDP2 has no equal of.
        ImportError: a Lightning in which it keeps its choices somewhere else.
    """
    if type(strategy) not in FSDP1:
        derived = " derives from FSDPStrategy, and what it changes is not known" if isinstance(strategy, FSDP1) else ""
        raise TypeError(
            f"`{type(strategy).__name__}`{derived or ' is no FSDPStrategy'}, so it cannot become FSDP2. Derive from"
            " nothing: pass the choices themselves to `lightning_lowprec.FSDP2Strategy(...)` (in Fabric"
            " `FabricFSDP2Strategy`), or an `FSDPStrategy(...)` to `from_fsdp`."
        )
    check_names(strategy)
    kwargs = dict(strategy._fsdp_kwargs if isinstance(strategy, fabric.FSDPStrategy) else strategy.kwargs)
    _check_owned_by_others(strategy)
    arguments = {
        "state_dict_type": strategy._state_dict_type,
        "process_group_backend": strategy._process_group_backend,
        "timeout": strategy._timeout,
        "cluster_environment": strategy.cluster_environment,
        "checkpoint_io": getattr(strategy, "_checkpoint_io", None),
        **_sharding(strategy.sharding_strategy.name, kwargs.pop("device_mesh", None)),
        **_dtypes(strategy.mixed_precision),
    }
    if kwargs.get("auto_wrap_policy") is not None:
        arguments["wrap"] = classes_or_predicate(kwargs["auto_wrap_policy"], "auto_wrap_policy", "wrap")
    if strategy._activation_checkpointing_kwargs:
        arguments["activation_checkpointing"] = _checkpointed(strategy._activation_checkpointing_kwargs)
    if strategy.cpu_offload.offload_params:
        arguments["cpu_offload"] = True
    if kwargs.get("sync_module_states"):
        arguments["sync_module_states"] = True
    dropped = _dropped(kwargs)
    arguments = {name: value for name, value in arguments.items() if value is not None or name == "timeout"}
    _say(arguments, dropped)
    return arguments


def _check_owned_by_others(strategy: Any) -> None:
    plugin = strategy._precision if isinstance(strategy, fabric.FSDPStrategy) else strategy._precision_plugin
    owned = {"precision": plugin, "accelerator": strategy._accelerator, "devices": strategy._parallel_devices}
    for argument, value in owned.items():
        if value is not None:
            raise ValueError(
                f"`FSDPStrategy` was given {value!r}; pass `{argument}=` to Trainer or Fabric instead (a plugin by"
                " `plugins=`)."
            )


def _sharding(name: str, mesh: tuple[int, ...] | DeviceMesh | None) -> dict[str, Any]:
    if name == "NO_SHARD":
        raise ValueError("`sharding_strategy='NO_SHARD'` shards nothing; use `strategy='ddp'`.")
    hybrid, keep = "HYBRID" in name, name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    options: dict[str, Any] = {"reshard_after_forward": False} if keep else {}
    shape = tuple(mesh) if isinstance(mesh, tuple) else None if mesh is None else _shape(mesh)
    if shape is None:
        return options | ({"replicate": "nodes"} if hybrid else {})
    if len(shape) != (2 if hybrid else 1):
        raise ValueError(
            f"`device_mesh={mesh!r}` does not go with `sharding_strategy={name!r}`; a mesh (copies, shards) goes with"
            " 'HYBRID_SHARD', one of a single dimension with the others."
        )
    return options | {"replicate": shape[0] if hybrid else 1, "shards": shape[-1]}


def _shape(mesh: DeviceMesh) -> tuple[int, ...]:
    if not torch.equal(mesh.mesh.flatten().cpu(), torch.arange(mesh.mesh.numel())):
        raise ValueError(
            f"`device_mesh={mesh}` orders the ranks in its own way; FSDP2 here takes them in their order. Use"
            " `replicate=`, or `lightning_lowprec.parallelize(model, mesh, plugin)` with your own mesh."
        )
    return tuple(mesh.mesh.shape)


def _dtypes(chosen: MixedPrecision | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    default = MixedPrecision()
    remedies = {
        "keep_low_precision_grads": "leave it out; 'bf16-master' keeps bf16 gradients (and float32 masters)",
        "_module_classes_to_ignore": "leave it out, or give these modules another `wrap` and no `param_dtype`",
    }
    for name, remedy in remedies.items():
        got, usual = getattr(chosen, name, None), getattr(default, name, None)
        if got != usual:
            raise ValueError(f"`MixedPrecision({name}={got!r})` has no equal in FSDP2 (only {usual!r}): {remedy}.")
    return {
        "param_dtype": chosen.param_dtype,
        "reduce_dtype": chosen.reduce_dtype or chosen.param_dtype,  # as FSDP1 does
        "buffer_dtype": chosen.buffer_dtype,
    }


def _checkpointed(kwargs: Mapping[str, Any]) -> Any:
    if "check_fn" in kwargs:  # Lightning's deprecated `activation_checkpointing`
        check = kwargs["check_fn"]
        return lambda fqn, module: bool(check(module))
    name = "activation_checkpointing_policy"
    return classes_or_predicate(kwargs["auto_wrap_policy"], name, "activation_checkpointing")


def _dropped(kwargs: Mapping[str, Any]) -> list[str]:
    dropped = [name for name in DROPPED if name in kwargs]
    if kwargs.get("use_orig_params") is False:
        dropped.append("use_orig_params")  # True is Lightning's default, and the only way of FSDP2
    known = {*DROPPED, "auto_wrap_policy", "sync_module_states", "use_orig_params"}
    for name, value in kwargs.items():
        if name not in known and value is not None:
            remedy = _NO_EQUAL.get(name, "leave it out")
            raise ValueError(f"`FSDPStrategy({name}=...)` has no equal in FSDP2: {remedy}.")
    return dropped


def _say(arguments: Mapping[str, Any], dropped: list[str]) -> None:
    usual = ("process_group_backend", "timeout", "cluster_environment", "checkpoint_io")
    shown = ", ".join(f"{name}={_shown(value)}" for name, value in arguments.items() if name not in usual)
    line = f"FSDPStrategy became FSDP2Strategy({shown})"
    if "wrap" not in arguments:
        line += "; without an auto_wrap_policy, repeated blocks are gathered one by one"
    if dropped:
        line += f"; dropped, as FSDP2 has its own way: {', '.join(sorted(dropped))}"
    rank_zero_info(f"{line}.")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(cls.__name__ for cls in value)}]"
    return getattr(value, "__name__", None) or repr(value)
