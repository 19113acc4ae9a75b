"""A callback that says how much FP8 takes from every layer, every few steps."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_lowprec.callbacks import readings as files
from lightning_lowprec.callbacks.readings import FILE, Reading
from lightning_lowprec.callbacks.sampling import Sampler
from lightning_lowprec.checks import Count, Rule
from lightning_lowprec.conversion.options import shows
from lightning_lowprec.messages import info, warn
from lightning_lowprec.precision.plain import unwrapped
from lightning_lowprec.private.either import Callback, LightningModule, Trainer
from lightning_lowprec.private.lightning import COMPILED_NAME, log_metrics
from lightning_lowprec.private.torch_modules import is_compiled
from lightning_lowprec.private.torch_optimizers import sees_no_masters

Log = bool | Literal["layers"]
Share = Annotated[float, Rule("a number above 0 and at most 1", lambda value: bool(0 < value <= 1))]


@final
@shows()
class NumericsMonitor(Callback):
    """Sample the casts of every converted layer; between two samplings nothing runs.

    A sampling looks at the first micro-batch of a step: for input, weight and output gradient of every layer, the
    largest value, the share of values that become 0, and the scale; and the signal to noise of the layer's output.
    Ranks agree on the numbers. They go to the Trainer's loggers, to a file that ``lowprec monitor`` draws, and to
    :attr:`readings`.

    In a Trainer, ``callbacks=[NumericsMonitor()]``. In Fabric, call :meth:`step` before the forward of every optimizer
    step, and :meth:`finish` after the last one.

    Args:
        every: sample every this many optimizer steps, from step 0.
        rows: the share of the rows (tokens; output features of weights) that are counted. Scales are computed from all
            rows.
        folder: where to write ``numerics.jsonl``; a file that exists is continued. None: the Trainer's
            ``default_root_dir``; in Fabric no file is written.
        log: what to send to the Trainer's loggers. True: the worst number of all layers and the mean
            (``lowprec/worst/input/underflow``, ``lowprec/mean/output_db``). ``"layers"``: the numbers of each layer too
            (``lowprec/<layer>/input/underflow``). False: nothing.

    Raises:
        ValueError: an argument that is not valid.
    """

    def __init__(
        self,
        every: Count = 100,
        *,
        rows: Share = 1 / 16,
        folder: str | Path | None = None,
        log: Log = True,
    ) -> None:
        self.every, self.rows = every, rows
        self._logs = log  # the Trainer sets `log` of every callback
        self.folder = None if folder is None else Path(folder)
        self.readings: list[Reading] = []
        """The readings of the last sampling."""
        self.missing: dict[str, str] = {}
        """By fqn, the converted layers that the last sampling could not look at, and why."""
        self._sampler: Sampler | None = None
        self._compiler = PausedCompiler()
        self._compiles = False
        """Whether code around the model was found to be compiled."""
        self._model: nn.Module | None = None
        self._last: int | None = None
        self._sampled = 0
        self._reported = False

    # ---- Fabric

    def step(self, model: nn.Module, step: int) -> None:
        """Call before the forward of every optimizer step: read what was sampled before, and sample if it is time.

        ``model`` is what ``fabric.setup`` returned, or the model inside. ``step`` is the number of optimizer steps that
        were made; after a resume, the number that was restored.
        """
        self._end(self.folder)
        self._begin(model, unwrapped(model), step, _device_of(model))

    def finish(self) -> list[Reading]:
        """Read a sampling that waits; return the last readings. Every rank must call this."""
        self._end(self.folder)
        self._release()
        return self.readings

    # ---- Trainer

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._begin(pl_module, pl_module, trainer.global_step, trainer.strategy.root_device)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            self._compiler.resume()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._end(Path(trainer.default_root_dir) if self.folder is None else self.folder) and self._logs:
            metrics = _summary(self.readings)
            if self._logs == "layers":
                metrics |= {name: value for reading in self.readings for name, value in _metrics(reading)}
            log_metrics(trainer, metrics)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._release()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if demoted := list(state_dict.get("demoted", ())):  # of a version that could do so
            warn(
                "NumericsMonitor: dropped from the checkpoint that these layers run in bf16. To go on so, resume with"
                f" `FP8TorchAO(keep={demoted!r})`."
            )

    # ---- both

    def _begin(self, called: nn.Module, model: nn.Module, step: int, device: torch.device) -> None:
        if model is not self._model:
            self._release()
            self._model, self._last = model, None
        last = step - 1 if self._last is None or step < self._last else self._last  # Fabric's user may have gone back
        self._last = step
        if step // self.every <= last // self.every:
            return
        if self._sampler is None:
            self._sampler = Sampler(model, every=round(1 / self.rows), device=device)
        self._sampler.arm(turn=step // self.every)
        self._sampled = step
        # calls of the model, of a module in it, or of a LightningModule's methods may be compiled
        marks = (is_compiled(module) or getattr(module, COMPILED_NAME, None) is not None for module in called.modules())
        if self._compiles or any(marks):
            self._compiler.pause()

    def _end(self, folder: Path | None) -> bool:
        """Read what was sampled since :meth:`_begin`; return whether there are new readings."""
        self._compiler.resume()
        sampler = self._sampler
        if sampler is None or not sampler.is_armed:
            return False
        sampler.disarm()
        first = not self._reported
        self._reported = True
        self.readings, self.missing = sampler.read(self._sampled), sampler.missing
        if not any(site.seen for site in sampler.sites) and "torch._dynamo" in sys.modules:
            self._compiles = True  # a compiled function calls the model, without hooks
        if first:
            info(_report(self.readings, self.missing))
        if folder is not None and not (dist.is_initialized() and dist.get_rank()):
            files.append(folder / FILE, self._sampled, self.readings)
        return True

    def _release(self) -> None:
        if self._sampler is not None:
            self._sampler.disarm()
        self._compiler.resume()
        self._sampler = self._model = None

    def __getstate__(self) -> dict[str, object]:
        """Leave out the model and its hooks, which stay in their process."""
        return {**self.__dict__, "_sampler": None, "_model": None}


def _summary(readings: Sequence[Reading]) -> dict[str, float]:
    """Return the worst numbers of all layers and their means; the least signal to noise is the worst."""
    values: dict[str, list[float | None]] = {}
    for reading in readings:
        for name in ("amax", "underflow"):
            values.setdefault(f"{reading.tensor}/{name}", []).append(getattr(reading, name))
    values["output_db"] = list({reading.fqn: reading.output_db for reading in readings}.values())
    metrics = {}
    for name, numbers in values.items():
        known = torch.tensor([number for number in numbers if number is not None])
        if len(known):
            metrics[f"lowprec/worst/{name}"] = float(known.min() if name == "output_db" else known.max())
            metrics[f"lowprec/mean/{name}"] = float(known.mean())
    return metrics


def _metrics(reading: Reading) -> list[tuple[str, float]]:
    path = f"lowprec/{reading.fqn}"
    numbers = {f"{path}/{reading.tensor}/{name}": getattr(reading, name) for name in files.NUMBERS}
    numbers[f"{path}/output_db"] = reading.output_db
    return [(name, value) for name, value in numbers.items() if value is not None]


def _report(readings: Sequence[Reading], missing: dict[str, str]) -> str:
    layers = len({reading.fqn for reading in readings})
    text = f"NumericsMonitor: {layers} layers are looked at"
    for reason in dict.fromkeys(missing.values()):
        names = [fqn for fqn, other in missing.items() if other == reason]
        text += f"; {len(names)} not ({names[0]}{', ...' if len(names) > 1 else ''}: {reason})"
    return text + "."


def _device_of(model: nn.Module) -> torch.device:
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else next(model.parameters(), torch.empty(0)).device


@final
class PausedCompiler:
    """torch's compiler, which :meth:`pause` pauses for forward and backward until :meth:`resume`."""

    def __init__(self) -> None:
        self._stance = ExitStack()
        self._handles: list[RemovableHandle] = []

    def pause(self) -> None:
        """Run compiled code eagerly from now on, except within the step of an optimizer."""
        self._set()

        @sees_no_masters
        def before(optimizer: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if not any(map(callable, (*args[1:], *kwargs.values()))):  # a closure runs forward and backward in the step
                self._stance.close()

        @sees_no_masters
        def after(optimizer: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            self._set()

        self._handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def resume(self) -> None:
        """Run compiled code by the compiler again; a second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._stance.close()

    def _set(self) -> None:
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))
