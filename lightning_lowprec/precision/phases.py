"""Follow a schedule: before each forward, give the layers of a plugin the phase of the optimizer step.

The phase is a function of the step alone, so a run that is resumed goes on in the right phase. The step is the number
of optimizer steps before it: in the Trainer ``trainer.global_step``, which counts the steps of all optimizers, and the
steps that fp16 skips; in Fabric the number that ``plugin.set_step`` was given. A phase begins with the first forward at
or after its step, so all micro-batches of a step run in one phase.

Without a step, that is, in an evaluation before any fit, layers are in the last phase, as at the end of a run.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.nn import Module

from lightning_lowprec.checks import check_integer
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.recipe_map import nearest_fqns
from lightning_lowprec.conversion.selection import matches
from lightning_lowprec.precision.host import trainer_of
from lightning_lowprec.precision.schedule import Phase, Schedule
from lightning_lowprec.private.either import Trainer, TrainerFn

METRIC = "precision/phase"  # the name of the metric: the number of the phase, from 0; logged where a phase begins


@final
class ScheduledPhases:
    """The phases of one plugin, and the phase in which its layers are."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._told: tuple[int, int | None] | None = None
        self._known: tuple[Any, ...] | None = None
        self._ends: tuple[int, ...] = ()
        self._checked = False
        self._applied: int | None = None
        self._logged: int | None = None

    @property
    def current(self) -> Phase | None:
        """The phase of the layers; None: no phase yet."""
        return None if self._applied is None else self.schedule.phases[self._applied]

    def forget(self) -> None:
        """Note that the plugin has converted layers, which are in no phase yet."""
        self._applied, self._checked = None, False

    def set_step(self, plugin: Any, step: int, total: int | None) -> None:
        """Fabric: note the number of optimizer steps before the next one, and of the whole run; see ``set_step``."""
        if any(_trainers(plugin)):
            raise RuntimeError("`set_step` is for Fabric: the Trainer tells its step by itself. Leave the call out.")
        check_integer("step", step, least=0)
        if total is not None:
            check_integer("total", total, least=1)
        elif self.schedule.reads_total:
            raise ValueError(
                "`total=None` is not possible for a `schedule` with fractions of the run: give the number of optimizer"
                " steps of the run (`plugin.set_step(step, total=N)`), or steps in place of fractions."
            )
        self._told = step, total
        if not plugin.modules.waiting:
            self.follow(plugin)

    def follow(self, plugin: Any) -> None:
        """Give the layers the phase of the step, if they are in another."""
        trainer = next(_trainers(plugin), None)
        step = self._step_in_fabric(plugin) if trainer is None else self._step_in_trainer(plugin, trainer)
        phase = len(self.schedule.phases) - 1 if step is None else bisect_right(self._ends, step)
        if phase != self._applied:
            self._apply(plugin, phase, step)
        if trainer is not None and trainer.training and phase != self._logged:
            self._logged = phase
            for logger in trainer.loggers:
                logger.log_metrics({METRIC: float(phase)}, step=trainer.global_step)

    def _step_in_fabric(self, plugin: Any) -> int | None:
        if self._told is None:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"`precision={plugin.precision!r}` has a `schedule`, and does not know the step. In Fabric call"
                    " `fabric.strategy.precision.set_step(step, total=N)` before each optimizer step."
                )
            return None
        step, total = self._told
        self._resolve(plugin, (total,), total)
        return step

    def _step_in_trainer(self, plugin: Any, trainer: Trainer) -> int | None:
        if trainer.state.fn != TrainerFn.FITTING and self._known is None:
            return None
        if trainer.state.fn == TrainerFn.FITTING:
            length = id(trainer), trainer.max_steps, trainer.max_epochs, trainer.fit_loop.epoch_loop.max_steps
            if length != self._known:
                total = _total(trainer, self.schedule, plugin.precision)
                lenient = bool(getattr(trainer, "fast_dev_run", False))  # its debug connector sets it
                self._resolve(plugin, length, total, lenient=lenient)
        return trainer.global_step

    def _resolve(self, plugin: Any, length: tuple[Any, ...], total: int | None, *, lenient: bool = False) -> None:
        """Compute the first steps of the phases, and say what will happen when; once per length of the run."""
        if length == self._known:
            return
        self._ends = self.schedule.ends(total, lenient=lenient)
        self._known = length
        rank_zero_info(f"{plugin.precision}: {said(self.schedule, self._ends, total, plugin.base, plugin.format)}.")

    def _apply(self, plugin: Any, number: int, step: int | None) -> None:
        backend = backends.get(plugin.backend)
        set_phase = backend.set_phase
        assert set_phase is not None
        layers: dict[str, Module] = {}
        for index, module in enumerate(_modules(plugin)):
            owned = {fqn: layer for fqn, layer in module.named_modules() if backend.owns(layer)}
            layers |= {(f"{index}:{fqn}" if index else fqn): layer for fqn, layer in owned.items()}
        for index, phase in enumerate(self.schedule.phases) if layers and not self._checked else ():
            for pattern in phase.keep:
                if not any(matches(pattern, fqn) for fqn in layers):
                    raise ValueError(
                        f"`schedule[{index}]['keep']` has {pattern!r}, which matches no converted layer;"
                        f" {nearest_fqns(pattern, layers)}."
                    )
        self._checked = True
        phase = self.schedule.phases[number]
        for fqn, layer in layers.items():
            set_phase(layer, phase.of_layer(fqn, matches))
        when = "without a step" if step is None else f"step {step}"
        if self._applied is not None or number or step is None:
            which = f"phase {number + 1} of {len(self.schedule.phases)}"
            rank_zero_info(f"{plugin.precision}: {when}: {which}: {phase.said(plugin.base, plugin.format)}.")
        self._applied = number


def _modules(plugin: Any) -> Iterator[Module]:
    """Yield the modules of a plugin; under FSDP2 also a module that another plugin has converted."""
    yield from dict.fromkeys([*plugin.modules.prepared, *(plugin.modules.sharded or ())])


def _trainers(plugin: Any) -> Iterator[Trainer]:
    trainers = (trainer_of(module) for module in _modules(plugin))
    return (trainer for trainer in trainers if trainer is not None and trainer.precision_plugin is plugin)


def _total(trainer: Trainer, schedule: Schedule, precision: str) -> int | None:
    """Return the number of optimizer steps of the run; None: unknown, and the schedule has no fractions."""
    automatic = trainer.lightning_module.automatic_optimization  # else a batch may take any number of steps
    total = trainer.max_steps if trainer.max_steps > 0 else math.inf
    if automatic and schedule.reads_total:
        total = trainer.estimated_stepping_batches
    if total == math.inf and schedule.reads_total:
        why = "" if automatic else " (manual optimization: any number per batch)"
        raise ValueError(
            f"`schedule` of `precision={precision!r}` has fractions of the run, and the number of optimizer steps is"
            f" not known{why}. Set `Trainer(max_steps=...)`, or give steps in place of fractions."
        )
    return None if total == math.inf else int(total)


def said(schedule: Schedule, ends: Sequence[int], total: int | None, high: str, low: str = "FP8") -> str:
    """Return what happens when: ``schedule: steps 0 to 9: FP8; from step 10: forward in bf16``."""
    parts, begin = [], 0
    for phase, end in zip(schedule.phases, (*ends, None), strict=True):
        if end is None:
            when = f"from step {begin}"
        else:
            when = f"steps {begin} to {end - 1}" if end > begin + 1 else f"step {begin}"
        if total is not None and begin >= total:
            when += f", which a run of {total} steps does not reach"
        if end is None or end > begin:
            parts.append(f"{when}: {phase.said(high, low)}")
        begin = begin if end is None else end
    return f"schedule{'' if total is None else f' over {total} steps'}: {'; '.join(parts)}"
