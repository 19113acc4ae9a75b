"""Private names of Lightning that this package uses."""

import inspect
from collections.abc import Iterable
from typing import Any, Final

import torch

from lightning_lowprec.checks import abstract
from lightning_lowprec.private import either
from lightning_lowprec.private.either import MAIN, Package, both, namesake

MODEL_PARALLEL_NAMES: Final = ("_data_parallel_size", "_tensor_parallel_size", "_device_mesh", "_process_group_backend")
"""Attributes of ModelParallelStrategy, which 'fsdp2' sets."""
SIGNAL_NAMES: Final = ("received_sigterm", "_sigterm_notifier_fn")
"""Attributes of the Trainer's ``_signal_connector``."""
PRECISION_NAMES: Final = ("_after_closure", "_clip_gradients")
"""Attributes of the Trainer's precision plugins."""
DDP_NAMES: Final = ("_register_ddp_hooks", "_ddp_comm_hook", "_ddp_comm_state", "_ddp_comm_wrapper")
"""Attributes of the Trainer's DDPStrategy. The first registers the others at DDP, on CUDA only."""
GRAPH_NAME: Final = "_log_graph"
"""Attribute of TensorBoardLogger: whether it traces the model, for a picture."""
STEP_NAME: Final = "_batches_that_stepped"
"""Attribute of the Trainer's loop over an epoch: the step at which ``self.log`` and LearningRateMonitor log."""
TUNER_NAME: Final = "_early_exit"
"""Attribute of the callbacks that search for the Tuner: whether the Trainer stops after the search."""
FSDP_NAMES: Final = {
    "state_dict_type": "_state_dict_type",
    "process_group_backend": "_process_group_backend",
    "timeout": "_timeout",
    "cluster_environment": "cluster_environment",
    "activation_checkpointing": "_activation_checkpointing_kwargs",
    "cpu_offload": "cpu_offload",
    "mixed_precision": "mixed_precision",
    "sharding_strategy": "sharding_strategy",
}
"""Attributes of FSDPStrategy, in Fabric and in the Trainer, by the choices that they hold."""
FABRIC_FSDP_NAMES: Final = {"precision": "_precision", "fsdp": "_fsdp_kwargs"}
TRAINER_FSDP_NAMES: Final = {"precision": "_precision_plugin", "fsdp": "kwargs", "checkpoint_io": "_checkpoint_io"}
"""More of them; "fsdp" holds the arguments of ``FullyShardedDataParallel``."""
COMPILED_NAME: Final = "_compiler_ctx"
"""Attribute of a LightningModule: how the user compiled it."""
UNWRAPPED_NAME: Final = "compile_kwargs"
"""Variable of Fabric's ``setup`` and ``setup_module``: how the user compiled the module; None if not."""


def moved() -> list[str]:
    """Return the private names that the installed Lightning no longer has, in words; empty on supported versions."""
    fabric, trainer, callbacks = either.fabric_strategies, either.trainer_strategies, either.trainer_callbacks
    signals = MAIN.module("pytorch.trainer.connectors.signal_connector")._SignalConnector

    used: dict[str, tuple[type, Iterable[str]]] = {
        "ModelParallelStrategy": (trainer.ModelParallelStrategy, MODEL_PARALLEL_NAMES),
        "Fabric's ModelParallelStrategy": (fabric.ModelParallelStrategy, MODEL_PARALLEL_NAMES),
        "FSDPStrategy": (trainer.FSDPStrategy, (FSDP_NAMES | TRAINER_FSDP_NAMES).values()),
        "Fabric's FSDPStrategy": (fabric.FSDPStrategy, (FSDP_NAMES | FABRIC_FSDP_NAMES).values()),
        "_SignalConnector": (signals, SIGNAL_NAMES),
        "Precision": (either.TrainerPrecision, PRECISION_NAMES),
        "LightningModule": (either.LightningModule, (COMPILED_NAME,)),
        "DDPStrategy": (trainer.DDPStrategy, DDP_NAMES),
        "_TrainingEpochLoop": (MAIN.module("pytorch.loops.training_epoch_loop")._TrainingEpochLoop, (STEP_NAME,)),
        "TensorBoardLogger": (MAIN.module("pytorch.loggers.tensorboard").TensorBoardLogger, (GRAPH_NAME,)),
        "ModelSummary": (MAIN.module("pytorch.utilities.model_summary").ModelSummary, ("_precision_megabytes",)),
        "LearningRateFinder": (callbacks.LearningRateFinder, (TUNER_NAME,)),
        "BatchSizeFinder": (callbacks.BatchSizeFinder, (TUNER_NAME,)),
    }
    missing = [f"{owner}.{name}" for owner, (cls, names) in used.items() for name in names if not _has(cls, name)]
    missing += [
        f"Fabric.{code.co_name}, variable {UNWRAPPED_NAME}"
        for code in _fabric_setups()
        if UNWRAPPED_NAME not in code.co_varnames
    ]
    return [*moved_connectors(MAIN), *missing]


def _has(cls: type, name: str) -> bool:
    codes = [getattr(inspect.unwrap(vars(base).get("__init__", object)), "__code__", None) for base in cls.__mro__]
    return hasattr(cls, name) or any(name in code.co_names for code in codes if code is not None)


def _check(owner: object, names: Iterable[str], consequence: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ImportError(
            f"{MAIN.name} {MAIN.version} has moved {', '.join(missing)} of {consequence} lightning_lowprec is"
            " tested with lightning 2.4.0 to 2.6."
        )


# ---- FSDP2


def check_model_parallel(strategy: object) -> None:
    """Raise ImportError if this Lightning's ModelParallelStrategy lacks one of :data:`MODEL_PARALLEL_NAMES`."""
    _check(strategy, MODEL_PARALLEL_NAMES, "ModelParallelStrategy, so 'fsdp2' does not run on it;")


def set_names(owner: object, **values: object) -> None:
    """Set attributes of a ModelParallelStrategy or LightningModule, by their names without the first underscore."""
    for name, value in values.items():
        setattr(owner, f"_{name}", value)


def fsdp_choices(strategy: object, *, in_fabric: bool) -> dict[str, Any]:
    """Return what an FSDPStrategy of Fabric or of the Trainer was made with, by the keys of :data:`FSDP_NAMES`."""
    names = FSDP_NAMES | (FABRIC_FSDP_NAMES if in_fabric else TRAINER_FSDP_NAMES)
    instead = "write `lightning_lowprec.FSDP2Strategy(...)` (in Fabric `FabricFSDP2Strategy`) instead."
    _check(strategy, names.values(), f"FSDPStrategy, so it cannot be translated; {instead}")
    return {choice: getattr(strategy, name) for choice, name in names.items()}


def note_sigterm(trainer: Any) -> None:
    """Let the handler of SIGTERM do only two things: note the signal, and pass it on to the ranks started by this one.

    Lightning 2.6 broadcasts inside the handler. Ranks that are in another collective then wait for each other for ever.
    Lightning ends a run after the batch if a signal was noted, as 2.5 does. To be removed when Lightning's handler
    calls no collective any more.
    """
    connector: Any = getattr(trainer, "_signal_connector", None)
    if not all(hasattr(connector, name) for name in SIGNAL_NAMES):
        return

    def notify(signum: int, frame: object) -> None:
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


def connector(package: Package, *, for_trainer: bool) -> Any:
    """Return the class that reads the arguments of the Trainer or of Fabric; None if it is gone."""
    module, name = "fabric.connector", "_Connector"
    if for_trainer:
        module, name = "pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"
    return getattr(package.module(module), name, None)


def moved_connectors(package: Package) -> list[str]:
    """Return what is missing of the connectors, in words: without it no name can be added to ``precision=``."""
    problems = []
    for for_trainer, name in ((False, "_Connector"), (True, "_AcceleratorConnector")):
        if package.imported(for_trainer=for_trainer):
            cls = connector(package, for_trainer=for_trainer)
            check = getattr(cls, CHECK_CONFIG, None)
            if check is None or not inspect.signature(check).parameters.keys() >= _CONFIG_ARGUMENTS:
                problems.append(f"{name}.{CHECK_CONFIG}")
            if not hasattr(cls, LAZY_INIT):
                problems.append(f"{name}.{LAZY_INIT}")
    return problems


def strategy_registry(package: Package, *, for_trainer: bool) -> Any:
    """Return Lightning's registry of strategies: name -> ``{"strategy": class, ...}``."""
    if for_trainer:
        return package.module("pytorch.strategies").StrategyRegistry
    return package.module("fabric.strategies").STRATEGY_REGISTRY


def comm_hook(strategy: object) -> object:
    """Return what the user gave to ``DDPStrategy(ddp_comm_hook=...)``, or None."""
    return getattr(strategy, "_ddp_comm_hook", None)


def register_comm_hook(strategy: Any) -> None:
    """Register the user's communication hook at the model of a Trainer's DDPStrategy, as Lightning does on CUDA."""
    hook, wrapper = strategy._ddp_comm_hook, strategy._ddp_comm_wrapper
    strategy.model.register_comm_hook(strategy._ddp_comm_state, hook if wrapper is None else wrapper(hook))


def set_bytes_per_parameter(summary: Any, size: float) -> None:
    """Let a ModelSummary count ``size`` bytes for each parameter."""
    summary._precision_megabytes = size * 1e-6


def precision_plugin_of(model: object) -> object:
    """Return the precision plugin of the Trainer that a LightningModule is attached to, or None."""
    return getattr(getattr(model, "_trainer", None), "precision_plugin", None)


# ---- models that the user compiled as a whole


def is_compiled_whole(module: object) -> bool:
    """Return whether the user gave ``torch.compile(module)`` to the Trainer, or to the Fabric that sets it up now.

    Both take the compiled wrapper off before plugins see the module. The Trainer notes that on the module. Fabric notes
    that in a variable of its methods only, so this function must be called while ``setup`` or ``setup_module`` runs.
    """
    if getattr(module, COMPILED_NAME, None) is not None:
        return True
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _fabric_setups():
            # Without: under Fabric, blocks of a model that the user compiled as a whole are compiled once more.
            # It can go when Fabric notes at the module that the user compiled it, as the Trainer does.
            return frame.f_locals.get(UNWRAPPED_NAME) is not None
        frame = frame.f_back
    return False


def _fabric_setups() -> list[Any]:
    return [method.__code__ for cls in both(either.Fabric) for method in (cls.setup, cls.setup_module)]


def is_tuning(trainer: Any) -> bool:
    """Return whether the Trainer runs for a search of the Tuner, and not for the training itself."""
    finders = both(either.trainer_callbacks.BatchSizeFinder, either.trainer_callbacks.LearningRateFinder)
    return any(getattr(c, TUNER_NAME, False) for c in trainer.callbacks if isinstance(c, finders))


# ---- loggers


def traces(trainer: either.Trainer, model: object) -> bool:
    """Return whether a logger of ``trainer`` will trace ``model``, for a picture."""
    traceable = isinstance(getattr(model, "example_input_array", None), (torch.Tensor, tuple))
    return traceable and any(vars(logger).get(GRAPH_NAME) for logger in trainer.loggers)  # DummyLogger has every name


def logs_this_step(trainer: Any) -> bool:
    """Return whether ``self.log`` sends values of this step to the loggers."""
    every = trainer.log_every_n_steps
    return bool(every) and (_logged_step(trainer) + 1) % every == 0


def log_metrics(trainer: either.Trainer, metrics: dict[str, float]) -> None:
    """Send metrics to the loggers, and to ``callback_metrics``, where EarlyStopping and ModelCheckpoint look.

    The step is that of ``self.log`` and LearningRateMonitor: batches that stepped, however many optimizers there are.
    """
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=_logged_step(trainer))


def _logged_step(trainer: either.Trainer) -> int:
    step: int = getattr(trainer.fit_loop.epoch_loop, STEP_NAME)
    return step


# ---- the step of a precision plugin


@abstract
class EitherPrecision(either.TrainerPrecision):
    """Lightning's precision plugin, for the Trainer of either package."""

    def _clip_gradients(self, model: object, *args: object, **kwargs: object) -> None:
        """Clip as the package of ``model`` does: the other one clips nothing of a class that it does not know."""
        namesake(either.TrainerPrecision, type(model))._clip_gradients(self, model, *args, **kwargs)


def check_precision_plugin() -> None:
    """Raise ImportError if Lightning's Precision lacks what a step with loss scaling needs."""
    _check(either.TrainerPrecision, PRECISION_NAMES, "Precision, which loss scaling needs;")


def sees_gradients(model: Any) -> bool:
    """Return whether a hook of a LightningModule or of a callback may look at gradients between closure and step."""
    hooks = ("on_before_optimizer_step", "configure_gradient_clipping")
    owners = [
        (model, either.LightningModule, hooks),
        *((callback, either.Callback, hooks[:1]) for callback in model.trainer.callbacks),
    ]
    return any(_overrides(owner, base, hook) for owner, base, names in owners for hook in names)


def _overrides(owner: object, base: type, hook: str) -> bool:
    return getattr(type(owner), hook) not in [getattr(cls, hook) for cls in both(base)]


def after_closure(plugin: EitherPrecision, model: either.LightningModule, optimizer: torch.optim.Optimizer) -> None:
    """Run the Trainer's hooks between the closure and the step: ``on_before_optimizer_step``, then clipping."""
    plugin._after_closure(model, optimizer)
