"""Give the precision plugin of a Trainer a schedule, so that a name in ``precision=`` can have one."""

from collections.abc import Mapping, Sequence
from typing import Any, final

from typing_extensions import override

from lightning_lowprec.checks import check_types
from lightning_lowprec.precision.fp8 import Scheduled
from lightning_lowprec.precision.schedule import Phases, Schedule
from lightning_lowprec.private.either import Callback, LightningModule, Trainer


@final
class PrecisionSchedule(Callback):
    """Change the precision of matrix products during a run: bf16 at the start, FP8, bf16 at the end.

        Trainer(precision="fp8-hybrid", callbacks=PrecisionSchedule([{"until": 0.95}, {"gemms": {"forward": "bf16"}}]))

    The callback gives the plugin the option ``schedule``. It keeps no state: the phase is a function of the step.

    Args:
        phases: see the option ``schedule`` of :class:`~lightning_lowprec.FP8TorchAO`.

    Raises:
        ValueError: a phase is not valid.
    """

    def __init__(self, phases: Sequence[Mapping[str, Any]]) -> None:
        check_types({"phases": phases}, {"phases": Phases})
        Schedule.of(phases)
        self.phases = phases

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        plugin: Any = trainer.precision_plugin
        if not isinstance(plugin, Scheduled):
            raise ValueError(
                f"`PrecisionSchedule` does not go with `precision={trainer.precision!r}`, which has no layers that"
                " change between FP8 and bf16; expected a name of FP8TorchAO or FP8TE, such as 'fp8-hybrid'."
            )
        given = None if plugin.phases is None else plugin.phases.schedule
        if given is not None and given != Schedule.of(self.phases):
            raise ValueError(
                f"`PrecisionSchedule` and the `schedule` of `{type(plugin).__name__}` are different schedules of one"
                " run. Leave one of them out."
            )
        if given is None:
            plugin.set_schedule(self.phases)
