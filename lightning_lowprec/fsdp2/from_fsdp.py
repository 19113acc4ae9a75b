"""Translate Lightning's ``FSDPStrategy`` to FSDP2 by a table of its fields: the same choices, or an error."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

from lightning_lowprec.messages import info
from lightning_lowprec.private.either import both
from lightning_lowprec.private.either import fabric_strategies as fabric
from lightning_lowprec.private.either import trainer_strategies as trainer
from lightning_lowprec.private.fsdp2 import classes_of
from lightning_lowprec.private.lightning import fsdp_choices

FSDP1: Final = (fabric.FSDPStrategy, trainer.FSDPStrategy)


def translate(strategy: Any) -> dict[str, Any]:
    """Return the arguments of our strategies that mean the same as ``strategy``, and log them in one line."""
    if type(strategy) not in both(*FSDP1):
        raise TypeError(
            f"`{type(strategy).__name__}` is not FSDPStrategy itself, so it cannot become FSDP2: pass its choices to"
            " `lightning_lowprec.FSDP2Strategy(...)` (in Fabric `FabricFSDP2Strategy`)."
        )
    fields = fsdp_choices(strategy, in_fabric=isinstance(strategy, both(fabric.FSDPStrategy)))
    fields |= {"accelerator": strategy.accelerator, "devices": strategy.parallel_devices, **fields.pop("fsdp")}
    fields["sharding_strategy"] = fields["sharding_strategy"].name, fields.pop("device_mesh", None)
    arguments = {name: fields.pop(name) for name in _SAME if fields.get(name) is not None or name == "timeout"}
    dropped = [name for name in sorted(fields) if fields[name] is not None and name in _DROPPED]
    for name, value in fields.items():
        if name in _TRANSLATED and value is not None:
            arguments |= _TRANSLATED[name](value)
        elif name not in _DROPPED and value is not None:
            raise ValueError(
                f"`FSDPStrategy({name}=...)` has no equal in FSDP2: {_NO_EQUAL.get(name, 'leave it out')}."
            )
    classes = {name: f"[{', '.join(c.__name__ for c in v)}]" for name, v in arguments.items() if isinstance(v, tuple)}
    shown = [f"{name}={classes.get(name, repr(v))}" for name, v in arguments.items() if name not in _SAME[1:]]
    line = f"FSDPStrategy became FSDP2Strategy({', '.join(shown)})"
    line += "" if "wrap" in arguments else "; without an auto_wrap_policy, repeated blocks are gathered one by one"
    info(line + (f"; dropped, as FSDP2 has its own way: {', '.join(dropped)}." if dropped else "."))
    return arguments


def _sharding(chosen: tuple[str, object]) -> dict[str, object]:
    (name, mesh), hybrid = chosen, "HYBRID" in chosen[0]
    if name == "NO_SHARD":
        raise ValueError("`sharding_strategy='NO_SHARD'` shards nothing; use `strategy='ddp'`.")
    options: dict[str, object] = {}
    if name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"):
        options["reshard_after_forward"] = False
    if mesh is None:
        return options | ({"replicate": "nodes"} if hybrid else {})
    if not isinstance(mesh, tuple) or len(mesh) != 1 + hybrid:
        raise ValueError(
            f"`device_mesh={mesh!r}` does not go with `sharding_strategy={name!r}`: give (copies, shards) with"
            " 'HYBRID_SHARD', (shards,) with the others, or your own mesh to `lightning_lowprec.parallelize`."
        )
    return options | {"replicate": mesh[0] if hybrid else 1, "shards": mesh[-1]}


def _dtypes(chosen: MixedPrecision) -> dict[str, object]:
    dtypes = {name: getattr(chosen, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    if chosen != MixedPrecision(**dtypes):
        raise ValueError(f"`{chosen}` has no equal in FSDP2, which takes the three dtypes alone: leave the rest out.")
    return dtypes | {"reduce_dtype": chosen.reduce_dtype or chosen.param_dtype}  # as FSDP1 does


def _modules(policy: object, option: str) -> dict[str, object]:
    function, keywords = getattr(policy, "func", None), getattr(policy, "keywords", {})
    if function is lambda_auto_wrap_policy:
        return {option: lambda fqn, module: bool(keywords["lambda_fn"](module))}
    classes = keywords.get("transformer_layer_cls") if function is transformer_auto_wrap_policy else policy
    classes = classes_of(classes) if isinstance(classes, ModuleWrapPolicy) else classes
    if not isinstance(classes, (set, frozenset)):
        raise ValueError(
            f"FSDP2 has no equal of the policy {policy!r}: leave it out to gather the repeated blocks, or pass classes"
            f" or a function (fqn, module) -> bool by `{option}=` of `lightning_lowprec.FSDP2Strategy`."
        )
    return {option: tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))}


_SAME: Final = ("state_dict_type", "process_group_backend", "timeout", "cluster_environment", "checkpoint_io")
_TRANSLATED: Final[Mapping[str, Callable[[Any], dict[str, object]]]] = {
    "sharding_strategy": _sharding,
    "mixed_precision": _dtypes,
    "auto_wrap_policy": lambda policy: _modules(policy, "wrap"),
    "activation_checkpointing": lambda by: _modules(next(iter(by.values())), "activation_checkpointing") if by else {},
    "cpu_offload": lambda chosen: {"cpu_offload": True} if chosen.offload_params else {},
    "sync_module_states": lambda chosen: {"sync_module_states": True} if chosen else {},
    "use_orig_params": lambda chosen: {},  # FSDP2 has no other parameters
}
_DROPPED: Final = ("backward_prefetch", "device_id", "forward_prefetch", "limit_all_gathers")
"""Fields that tune FSDP1. FSDP2 has no such fields; the result of training is the same."""
_NO_EQUAL: Final = {  # and the remedy
    **{name: f"pass `{name}=` to Trainer or Fabric" for name in ("precision", "accelerator", "devices")},
    **dict.fromkeys(("ignored_modules", "ignored_states"), "shard by hand with `lightning_lowprec.parallelize`"),
    "param_init_fn": "give the modules a `reset_parameters()`, which is called where a model starts on meta",
    "process_group": "say how many copies there are with `replicate=`",
}
