"""Private names of Lightning that this package uses."""

from __future__ import annotations

import inspect
from typing import Any, Final, NamedTuple, get_args

TESTED: Final = "lightning_lowprec is tested with lightning 2.5.0 to 2.6."
MODEL_PARALLEL_NAMES: Final = (
    "_data_parallel_size",
    "_tensor_parallel_size",
    "_device_mesh",
    "_process_group_backend",
)
"""Attributes of ModelParallelStrategy, which 'fsdp2' sets."""
SIGNAL_NAMES: Final = ("received_sigterm", "_sigterm_notifier_fn")
"""Attributes of the Trainer's ``_signal_connector``."""
FSDP_NAMES: Final = (
    "_accelerator",
    "_activation_checkpointing_kwargs",
    "_parallel_devices",
    "_process_group_backend",
    "_state_dict_type",
    "_timeout",
    "cluster_environment",
    "cpu_offload",
    "mixed_precision",
    "sharding_strategy",
)
"""Attributes of FSDPStrategy, in Fabric and in the Trainer."""
FABRIC_FSDP_NAMES: Final = ("_fsdp_kwargs", "_precision")
TRAINER_FSDP_NAMES: Final = ("_checkpoint_io", "_precision_plugin", "kwargs")


def moved() -> list[str]:
    """Return the private names that the installed Lightning no longer has, in words; empty on supported versions."""
    return [*moved_connectors(), *_moved_of_fsdp2(), *_moved_of_precision()]


# ---- FSDP2


def _moved_of_fsdp2() -> list[str]:
    from lightning.fabric import strategies as fabric
    from lightning.pytorch import strategies as trainer
    from lightning.pytorch.trainer.connectors import signal_connector

    objects: dict[str, tuple[Any, tuple[str, ...]]] = {
        "ModelParallelStrategy": (trainer.ModelParallelStrategy(), MODEL_PARALLEL_NAMES),
        "Fabric's ModelParallelStrategy": (fabric.ModelParallelStrategy(lambda m, mesh: m), MODEL_PARALLEL_NAMES),
        "FSDPStrategy": (trainer.FSDPStrategy(), (*FSDP_NAMES, *TRAINER_FSDP_NAMES)),
        "Fabric's FSDPStrategy": (fabric.FSDPStrategy(), (*FSDP_NAMES, *FABRIC_FSDP_NAMES)),
    }
    missing = [
        f"{owner}.{name}"
        for owner, (instance, names) in objects.items()
        for name in names
        if not hasattr(instance, name)
    ]
    connector: Any = signal_connector._SignalConnector
    known = (*dir(connector), *connector.__init__.__code__.co_names)  # a method, and an attribute set by `__init__`
    return missing + [f"_SignalConnector.{name}" for name in SIGNAL_NAMES if name not in known]


def check_model_parallel(strategy: Any) -> None:
    """Raise ImportError if this Lightning's ModelParallelStrategy lacks one of :data:`MODEL_PARALLEL_NAMES`."""
    missing = [name for name in MODEL_PARALLEL_NAMES if not hasattr(strategy, name)]
    if missing:
        raise ImportError(
            f"{_version()} has moved {', '.join(missing)} of ModelParallelStrategy, so 'fsdp2' does not run on it;"
            f" {TESTED}"
        )


def _version() -> str:
    import lightning

    return f"lightning {lightning.__version__}"


def set_parallel_sizes(strategy: Any, data: int, tensor: int) -> None:
    """Set the sizes from which a ModelParallelStrategy makes its mesh."""
    strategy._data_parallel_size = data
    strategy._tensor_parallel_size = tensor


def set_process_group_backend(strategy: Any, backend: str) -> None:
    """Set the backend of the process group, before it exists."""
    strategy._process_group_backend = backend


def set_device_mesh(owner: Any, mesh: Any) -> None:
    """Set the mesh of a ModelParallelStrategy or of a LightningModule."""
    owner._device_mesh = mesh


class FsdpChoices(NamedTuple):
    """The arguments that a user gave to Lightning's FSDPStrategy."""

    kwargs: dict[str, Any]
    """For ``FullyShardedDataParallel``."""
    precision: Any
    accelerator: Any
    devices: Any
    state_dict_type: str
    process_group_backend: str | None
    timeout: Any
    checkpoint_io: Any
    activation_checkpointing: dict[str, Any]


def fsdp_choices(strategy: Any, *, in_fabric: bool) -> FsdpChoices:
    """Return what an FSDPStrategy of Fabric or of the Trainer was made with.

    Raises:
        ImportError: this Lightning keeps the arguments under other names.
    """
    missing = [
        name
        for name in (*FSDP_NAMES, *(FABRIC_FSDP_NAMES if in_fabric else TRAINER_FSDP_NAMES))
        if not hasattr(strategy, name)
    ]
    if missing:
        raise ImportError(
            f"{_version()} has moved {', '.join(missing)} of FSDPStrategy, so it cannot be translated; write"
            " `lightning_lowprec.FSDP2Strategy(...)` (in Fabric `FabricFSDP2Strategy`) instead."
            f" {TESTED}"
        )
    return FsdpChoices(
        kwargs=dict(strategy._fsdp_kwargs if in_fabric else strategy.kwargs),
        precision=strategy._precision if in_fabric else strategy._precision_plugin,
        accelerator=strategy._accelerator,
        devices=strategy._parallel_devices,
        state_dict_type=strategy._state_dict_type,
        process_group_backend=strategy._process_group_backend,
        timeout=strategy._timeout,
        checkpoint_io=getattr(strategy, "_checkpoint_io", None),
        activation_checkpointing=strategy._activation_checkpointing_kwargs,
    )


def note_sigterm(trainer: Any) -> None:
    """Let the handler of SIGTERM do only two things: note the signal, and pass it on to the ranks started by this one.

    Lightning 2.6 broadcasts inside the handler, wherever the training step is just then. Ranks that are in another
    collective then wait for each other for ever. Lightning ends a run after the batch if a signal was noted, as 2.5
    does. To be removed when Lightning's handler calls no collective any more. If Lightning has moved the names, its
    own handler stays.
    """
    connector: Any = getattr(trainer, "_signal_connector", None)
    if not all(hasattr(connector, name) for name in SIGNAL_NAMES):
        return

    def notify(signum: int, frame: Any) -> None:
        if not connector.received_sigterm and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = notify


# ---- names in `precision=`

CHECK_CONFIG: Final = "_check_config_and_set_final_flags"
"""Method of both connectors. It gets ``precision``, ``plugins`` and ``strategy`` after the launchers' variables."""
LAZY_INIT: Final = "_lazy_init_strategy"
"""Method of both connectors. When it returns, the strategy exists."""
COMPUTE_DTYPE: Final = "_plugin_to_compute_dtype"
"""Function of the two throughput modules: the dtype whose peak rate bounds a precision plugin."""
_CONFIG_ARGUMENTS: Final = {"strategy", "accelerator", "precision", "plugins"}
_INPUTS: Final = ("_PRECISION_INPUT_STR", "_PRECISION_INPUT_INT", "_PRECISION_INPUT_STR_ALIAS")


def connector(*, for_trainer: bool) -> Any:
    """Return the class that reads the arguments of the Trainer or of Fabric; None if it is gone."""
    import lightning.fabric.connector as fabric
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer

    return getattr(trainer, "_AcceleratorConnector", None) if for_trainer else getattr(fabric, "_Connector", None)


def moved_connectors() -> list[str]:
    """Return what is missing of the connectors, in words: without it no name can be added to ``precision=``."""
    import lightning.fabric.plugins.precision.precision as inputs

    problems = []
    for for_trainer, name in ((False, "_Connector"), (True, "_AcceleratorConnector")):
        cls = connector(for_trainer=for_trainer)
        check = getattr(cls, CHECK_CONFIG, None)
        if check is None or not inspect.signature(check).parameters.keys() >= _CONFIG_ARGUMENTS:
            problems.append(f"{name}.{CHECK_CONFIG}")
        if not hasattr(cls, LAZY_INIT):
            problems.append(f"{name}.{LAZY_INIT}")
    return problems if hasattr(inputs, _INPUTS[0]) else [*problems, _INPUTS[0]]


def precision_names() -> tuple[str | int, ...]:
    """Return everything that Lightning itself accepts after ``precision=``."""
    import lightning.fabric.plugins.precision.precision as inputs

    return tuple(value for group in _INPUTS for value in get_args(getattr(inputs, group, None)))


def strategy_registry(*, for_trainer: bool) -> Any:
    """Return Lightning's registry of strategies: name -> ``{"strategy": class, ...}``."""
    import lightning.fabric.connector as fabric
    import lightning.pytorch.trainer.connectors.accelerator_connector as trainer

    return trainer.StrategyRegistry if for_trainer else fabric.STRATEGY_REGISTRY


def strategy_names(connector: Any) -> Any:
    """Return the names of strategies that a connector knows."""
    return getattr(connector, "_registered_strategies", ())


def comm_hook(strategy: Any) -> Any:
    """Return what the user gave to ``DDPStrategy(ddp_comm_hook=...)``, or None."""
    return getattr(strategy, "_ddp_comm_hook", None)


def set_bytes_per_parameter(summary: Any, size: float) -> None:
    """Let a ModelSummary count ``size`` bytes for each parameter."""
    summary._precision_megabytes = size * 1e-6


def precision_plugin_of(model: Any) -> Any:
    """Return the precision plugin of the Trainer that a LightningModule is attached to, or None."""
    return getattr(getattr(model, "_trainer", None), "precision_plugin", None)


# ---- the step of a precision plugin


def _moved_of_precision() -> list[str]:
    from lightning.pytorch.plugins.precision import Precision

    return [] if hasattr(Precision, "_after_closure") else ["Precision._after_closure"]


def check_precision_plugin() -> None:
    """Raise ImportError if Lightning's Precision lacks what a step with loss scaling needs."""
    missing = _moved_of_precision()
    if missing:
        raise ImportError(f"{_version()} has moved {', '.join(missing)}, which loss scaling needs; {TESTED}")


def after_closure(plugin: Any, model: Any, optimizer: Any) -> None:
    """Run the Trainer's hooks between the closure and the step: ``on_before_optimizer_step``, then clipping."""
    plugin._after_closure(model, optimizer)
