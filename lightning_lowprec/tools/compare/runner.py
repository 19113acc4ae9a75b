"""``lowprec compare``, from a shell and from Python: train the precisions, each in a fresh process, and report."""

import inspect
import math
import multiprocessing
import os
import platform
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm
from typing_extensions import override

from lightning_lowprec.extras import import_refusal, require
from lightning_lowprec.hardware import describe
from lightning_lowprec.names import validate_name
from lightning_lowprec.other_stacks import unknown_option
from lightning_lowprec.private import either
from lightning_lowprec.private.either import Callback, LightningModule, Trainer, seed_everything
from lightning_lowprec.tools.class_path import build, load_class
from lightning_lowprec.tools.compare.comparison import REPORT, Comparison, PrecisionResult, write_report
from lightning_lowprec.tools.options import DEFAULT_PRECISIONS, CompareSpec
from lightning_lowprec.tools.output import prints_to_stderr, working

ERROR_LINES = 12
LINES = 10.0
"""Seconds from one line about a run to the next, where stderr is no terminal."""
START: Final = "spawn"
"""How a process starts: from nothing, as the figures of a precision must not depend on the one before."""
DEMO = "lightning_lowprec.tools.demo"


def run(args: Namespace) -> int:
    """Train, then print the table and the path of the report; return 1 if a precision failed or is off the baseline."""
    with prints_to_stderr(wanted=args.json):
        comparison = train_all(args.spec)
    status = 0 if comparison.ok else 1
    if args.json:
        print(comparison.to_json(), end="")
    else:
        print(comparison)
        print(comparison.spec.out / REPORT)
        print(f"{comparison.sentence} The exit status is {status}.")
        if comparison.spec.model.startswith(DEMO):
            from lightning_lowprec.tools.demo import NEXT

            print(NEXT)
    return status


def compare(
    precisions: Sequence[str] = DEFAULT_PRECISIONS,
    model: str | type = f"{DEMO}.ByteGPT",
    data: str | type = f"{DEMO}.StdlibText",
    *,
    out: str | Path = "lowprec-compare",
    progress: bool = True,
    **settings: Any,
) -> Comparison:
    """Train one model under several precisions, with the same data and the same seed: ``lowprec compare``.

    Each precision trains in a process of its own. A precision that fails does not stop the others, and the result says
    why it failed. ``out`` has the picture of the losses, ``loss.png``.

    Args:
        precisions: names for ``Trainer(precision=...)``; the first is the baseline.
        model: a LightningModule: a class of a module, or ``"package.module.Class"`` or ``"path/to/file.py:Class"``.
        data: a LightningDataModule, written like the model.
        out: folder for the report, the picture, the figures and the logs.
        progress: whether a bar per precision is shown on stderr.
        settings: what ``lowprec compare`` takes as options, with underscores: ``model_args={"depth": 2}``,
            ``max_steps=100``, ``seeds=3``, ``force=True``.

    Raises:
        ValueError: a precision or a setting is not valid, or the class is not in a module; or ``out`` holds a report,
            and ``force=True`` is not given.
        TypeError: there is no such setting.
        ImportError: a class does not import, or matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    options = [field.name for field in fields(CompareSpec)]
    for name in settings.keys() - set(options):
        raise unknown_option("compare", name, options)
    spec = CompareSpec(
        precisions=list(precisions), model=_path("model", model), data=_path("data", data), out=Path(out), **settings
    )
    return train_all(spec, progress=progress)


def _path(name: str, cls: str | type) -> str:
    if isinstance(cls, str):
        return cls
    if not inspect.isclass(cls):
        raise ValueError(
            f"`{name}={cls!r}` is not valid; expected a class or its path, such as 'my.Model': each precision makes"
            f" an instance. Give the arguments of the class by `{name}_args`."
        )
    if cls.__module__ == "__main__" or "." in cls.__qualname__:
        raise ValueError(
            f"`{name}={cls!r}` is not valid: each precision trains in a process of its own, which cannot import this"
            f" class. Write the class into a file, and give 'file.py:{cls.__name__}'."
        )
    return f"{cls.__module__}.{cls.__name__}"


def train_all(spec: CompareSpec, *, progress: bool = True) -> Comparison:
    """Train every precision of ``spec``, and write ``report.md``, ``loss.png``, ``results.json`` and the logs."""
    for name in spec.precisions:
        validate_name(name)
    with working("importing the model and the data"):
        require("matplotlib", "`lowprec compare`")
        _check_validation(load_class(spec.model), "validation_step", either.LightningModule)
        _check_validation(load_class(spec.data), "val_dataloader", either.LightningDataModule)
    with _locked(spec.out, force=spec.force):
        results = [run_one(spec, name, seed, progress=progress) for seed, name in spec.runs]
        comparison = Comparison(spec=spec, results=results)
        with working("drawing the report"):
            write_report(comparison)
    return comparison


def _check_validation(cls: object, method: str, base: type) -> None:
    """Raise, before anything is trained, if a class leaves out what the validation needs."""
    if inspect.isclass(cls) and getattr(cls, method, None) in [getattr(b, method) for b in either.both(base)]:
        raise ValueError(f"{cls.__name__} has no `{method}`: `lowprec compare` judges by the loss of validation.")


def _locked(out: Path, *, force: bool) -> AbstractContextManager[object]:
    out.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(out / ".lowprec-compare.lock").acquire(blocking=False)
    except Timeout as error:
        raise ValueError(
            f"`out={str(out)!r}` is in use: another comparison is running there. Give another folder by `--out`."
        ) from error
    if (out / REPORT).exists() and not force:
        lock.lock.release()
        raise ValueError(
            f"`out={str(out)!r}` holds the report of an earlier comparison. Give another folder by `--out`, or"
            " `--force` to write over the report."
        )
    return lock


def run_one(spec: CompareSpec, name: str, seed: int, *, progress: bool = True) -> PrecisionResult:
    """Train one precision in a fresh process, whose stderr goes to ``<out>/<name>.log`` (``<name>-seed<seed>.log``)."""
    title, log = name, spec.out / f"{name}.log"
    if spec.seeds > 1:
        title = f"{name}, seed {seed} ({spec.runs.index((seed, name)) + 1} of {len(spec.runs)})"
        log = spec.out / f"{name}-seed{seed}.log"
    log.write_text("", encoding="utf-8")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads are 10 times slower on a busy machine
    context = multiprocessing.get_context(START)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(spec, name, seed, log, sender))
    process.start()
    sender.close()  # the process has its own copy; without ours, the pipe ends when the process ends
    result = PrecisionResult(name=name, seed=seed)
    try:
        _receive(receiver, result, title, spec.max_steps if progress else None)
        process.join()
    finally:
        process.kill()
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    result.notes = [line.partition(": ")[2] for line in lines if line.startswith(f"{name}: ")]
    if process.exitcode:
        result.error = _error(process.exitcode, lines)
        tqdm.write(f"{title} failed, its log is {log}:\n{result.error}", file=sys.stderr)
    return result


def _receive(figures: Connection, result: PrecisionResult, title: str, max_steps: int | None) -> None:
    """Add the figures to ``result`` until the process closes the pipe; show them unless ``max_steps`` is None.

    On a terminal by a bar, else by a line every ten seconds and at the end.
    """
    on_terminal, said = sys.stderr.isatty(), time.monotonic()
    look: dict[str, Any] = {"unit": "step", "dynamic_ncols": True, "disable": max_steps is None or not on_terminal}
    with tqdm(total=max_steps, desc=title, **look) as bar, suppress(EOFError):
        while True:
            message = figures.recv()
            result.add(message)
            if "loss" in message:
                bar.set_postfix(loss=f"{message['loss']:.3f}", refresh=False)
                bar.update(message["step"] - bar.n)
                due = message["step"] == max_steps or time.monotonic() - said >= LINES
                if max_steps is not None and not on_terminal and due:
                    line = f"{title}: step {message['step']} of {max_steps}, loss {message['loss']:.3f}"
                    print(line, file=sys.stderr, flush=True)
                    said = time.monotonic()
            elif "val" in message:
                bar.set_postfix(val=f"{message['val']:.4f}")


def _error(status: int, lines: list[str]) -> str:
    tail = "\n".join(deque((line for line in lines if line.strip()), ERROR_LINES))
    if status < 0:
        return f"{tail}\nthe process was killed by signal {-status} (9 often means: out of memory)".strip()
    return tail or f"the process ended with status {status} and wrote nothing to stderr"


Send = Callable[[dict[str, object]], object]


def train(spec: CompareSpec, precision: str, seed: int, log: Path, figures: Connection) -> None:
    """Train the model of a comparison as :func:`fit` does; stderr goes to ``log``."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    fit(spec, precision, seed, figures.send)


def fit(spec: CompareSpec, precision: str, seed: int, send: Send, callbacks: Sequence[Callback] = ()) -> None:
    """Train the model of a comparison under one precision with one seed.

    Every message is a dict: ``device`` and ``on_cpu``, first; ``loss``, ``seconds`` and ``step`` of a
    training batch; ``val`` of a validation; ``peak_memory``, last and on a GPU only.
    """
    import_refusal("torchao.float8", "FP8")  # now, so that the import counts in no step time
    seed_everything(seed, verbose=False)
    model = build(spec.model, spec.model_args, seed=seed)
    data = build(spec.data, spec.data_args, seed=seed)
    seed_everything(seed, verbose=False)  # again: the constructors may have drawn numbers
    trainer = Trainer(
        precision=precision,  # type: ignore[arg-type]  # names of this package
        accelerator=spec.accelerator,
        devices=1,
        max_steps=spec.max_steps,
        max_epochs=-1,
        val_check_interval=spec.val_every,
        check_val_every_n_epoch=None,  # count batches across epochs
        limit_val_batches=spec.val_batches,
        callbacks=[Recorder(spec, send), *callbacks],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    device = trainer.strategy.root_device
    on_cpu = device.type == "cpu"
    chip = f"CPU ({platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} cores)"
    send({"device": chip if on_cpu else describe(device), "on_cpu": on_cpu})
    try:
        trainer.fit(model, data)
    finally:
        if device.type == "cuda":
            send({"peak_memory": torch.cuda.max_memory_allocated(device)})


@final
class Recorder(Callback):
    """Send the loss and time of every step and the metric of every validation, and stop after the last step."""

    def __init__(self, spec: CompareSpec, send: Send) -> None:
        self.spec = spec
        self.send = send
        self._started = 0.0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        loss = _loss(outputs)  # reading the loss waits for the GPU, so the time includes the optimizer step
        seconds = time.perf_counter() - self._started
        self.send({"loss": loss, "seconds": seconds, "step": trainer.global_step})
        if not math.isfinite(loss):
            raise FloatingPointError(f"the training loss is {loss} at step {trainer.global_step}")
        if trainer.global_step >= self.spec.max_steps:
            trainer.should_stop = True  # lets Lightning validate after the last step, wherever the interval falls

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        name, metrics = self.spec.val_metric, trainer.callback_metrics
        if name not in metrics:
            raise ValueError(
                f"`val_metric={name!r}` was not logged; logged: {', '.join(sorted(metrics)) or 'nothing'}. Name one of"
                " these, or log it in validation_step."
            )
        self.send({"val": float(metrics[name])})


def _loss(outputs: Any) -> float:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if loss is None:
        raise ValueError(
            "training_step returned no loss; expected a tensor or a dict with 'loss' (with manual optimization too),"
            " because the loss is what is compared."
        )
    return float(loss)
