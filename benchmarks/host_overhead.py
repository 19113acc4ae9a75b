"""Compare what Python and the libraries take to launch a step: ours against the same layers by hand, without a GPU.

python -m benchmarks.ledger.launch python -m benchmarks.host_overhead                  # torchao and Transformer Engine
python -m benchmarks.ledger.launch python -m benchmarks.host_overhead --pairs 'te current=ours current' --steps 60

The null GPU computes nothing, so a step takes the time of its host. Both sides of a pair live in one process and take
turns; a figure is the least processor time of many steps, which a busy machine disturbs little. Python calls of one
step are counted exactly. Two blocks of the 8B shape train with AdamW; those of torchao are compiled. Ours
trains by Fabric, whose calls count: about as many per step for any number of blocks.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from benchmarks.rivals import models, setups
from benchmarks.rivals.contenders import find
from benchmarks.rivals.running import Job, Running
from lightning_lowprec.private.transformer_engine import manager

WARM_STEPS = 5
PAIRS = ("torchao tensorwise, compiled=ours fp8-hybrid", "torchao rowwise, compiled=ours fp8-rowwise",
         "te delayed=ours delayed", "te delayed=ours fp8-hybrid-te", "te current=ours current")  # fmt: skip


def make(key: str, job: Job) -> Running:
    """Set up ``te RECIPE`` (by hand), ``ours RECIPE`` (the plugin, by the recipe), ``ours NAME`` or a contender."""
    who, _, what = key.partition(" ")
    if who == "torchao" or what in ("fp8-hybrid", "fp8-rowwise"):
        return find(key).setup(replace(job, compile=True))
    if who == "te":
        return setups.transformer_engine(job, recipe=what)
    if what.startswith(("fp8-", "mxfp8", "nvfp4")):
        return setups.ours(job, name=what)
    from lightning_lowprec import FP8TE

    return setups.lightning(job, plugin=FP8TE(what), compiled=False)


def least_ms(steps: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the least milliseconds of processor time of every function; they take turns."""
    best = [float("inf")] * len(steps)
    for _ in range(repeats):
        for index, step in enumerate(steps):
            start = time.process_time()
            step()
            best[index] = min(best[index], time.process_time() - start)
    return [1e3 * seconds for seconds in best]


def python_calls(step: Callable[[], Any]) -> Counter[str]:
    """Return the Python functions that one step calls, by ``file:function``, its backward pass included."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return calls


def compare(pair: str, job: Job, repeats: int) -> tuple[list[float], list[Counter[str]]]:
    """Return (milliseconds, Python calls) of both sides of ``"BY HAND=OURS"``."""
    data = models.batches(job.shape, 2, job.device, count=1)
    steps = []
    for key in pair.split("="):
        manager().quantization_state = state = type(manager().quantization_state)()
        steps.append(partial(_step, make(key, job), data, state))
    for step in steps * WARM_STEPS:
        step()
    with torch.autograd.set_multithreading_enabled(False):
        milliseconds = least_ms(steps, repeats)
    return milliseconds, [python_calls(step) for step in steps]


def _step(side: Running, data: Any, state: Any) -> None:
    """Step with Transformer Engine's state of this side: left alone, each side would renew the scales of both."""
    manager().quantization_state = state
    side.step(data)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line per pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, metavar="BY_HAND=OURS")
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args(arguments)
    torch.backends.cuda.enable_cudnn_sdp(False)
    shape = replace(models.SHAPES["8b"], layers=2, vocab=1024)
    job = Job(shape=shape, device=torch.device("cuda"), compile=False)
    for pair in chosen.pairs:
        (hand, ours), (calls, our_calls) = compare(pair, job, chosen.steps)
        print(
            f"{pair.replace('=', ' -> ')}: {hand:.2f} -> {ours:.2f} ms, ratio {ours / hand:.3f};"
            f" Python calls {calls.total()} -> {our_calls.total()}"
        )
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
