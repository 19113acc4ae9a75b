"""Private names of Lightning that this package uses."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

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
    return _moved_of_fsdp2()


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
