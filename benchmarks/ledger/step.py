"""Count one training step of a contender. Runs on the null GPU, in the process that calls it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.host_overhead import python_calls
from benchmarks.ledger import own_moved, te_moved, triton_bytes
from benchmarks.ledger.entry import OUTSIDE, Entry, amounts
from benchmarks.ledger.moved import Moved
from benchmarks.ledger.recorder import Log, Record, mark, recording
from benchmarks.rivals import bytes_held, models
from benchmarks.rivals.models import Shape
from benchmarks.rivals.running import Batch, Job, Running

WARM_STEPS = 3
"""Optimizer state, compiled code and the allocator's blocks are there after two steps; one more to be sure."""
SPACES = ("kernel", "gemm", "memset", "memcpy")
Setup = Callable[[Job], Running]


def measure(contender: str, setup: Setup, shape: Shape, *, batch: int = 2, compile: bool = True) -> Entry:
    """Set a contender up, warm it, and return the ledger's entry of its next step."""
    device = torch.device("cuda")
    torch.backends.cuda.enable_cudnn_sdp(False)
    triton_bytes.start(f"{shape} {batch}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    gc.collect()  # what compiled code of the last contender held goes with it
    running = setup(Job(shape=shape, device=device, compile=compile))
    data = models.batches(shape, batch, device, count=1)
    for _ in range(WARM_STEPS):
        running.step(data)
    counters = torch._dynamo.utils.counters
    peaks = _peaks(running, data[0])
    host_ms = min(_host_ms(running, data) for _ in range(3))
    calls = min(python_calls(partial(running.step, data)).total() for _ in range(2))
    log, moved = _recorded(running, data)
    stretches, loose = amounts(log.records, moved.operations, triton_bytes.KERNELS, triton_bytes.LAUNCHES)
    entry = Entry(
        contender=contender,
        device=torch.cuda.get_device_name(device),
        shape=asdict(shape),
        batch=batch,
        parameters=shape.parameters,
        stretches=stretches,
        waits=_words(log.waits()),
        refused=_words(log.of("refused", "unknown")),
        mallocs=log.count("malloc"),
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks={reason.partition("\n")[0]: count for reason, count in counters["graph_break"].items()},
        memory={**_held(running, data[0]), **peaks},
        loose=dict(loose),
        kernels=launches(log),
        host_ms=host_ms,
        python_calls=calls,
    )
    del running, data
    gc.collect()
    torch.cuda.empty_cache()
    return entry


def _recorded(running: Running, data: Sequence[Batch]) -> tuple[Log, Moved]:
    """Record one step. What is hooked for that may make torch compile once more, so a step comes before."""
    mark_blocks(list(getattr(running.bare, "layers", [])))
    moved = Moved()
    stops = [watch(moved.from_outside) for watch in (te_moved.watch, own_moved.watch)]
    try:
        running.step(data)
        triton_bytes.forget_launches()
        with torch.autograd.set_multithreading_enabled(False), recording() as log, moved:
            _marked_step(running, data[0])
    finally:
        for stop in stops:
            stop()
    return log, moved


def launches(log: Log) -> list[str]:
    """Return what was launched, in order: names, and of products everything that was recorded."""
    return [f"{r.name} {r.info if r.what == 'gemm' else ''}".strip() for r in log.of(*SPACES)]


def _marked_step(running: Running, batch: Batch) -> None:
    mark("phase forward")
    loss = running.forward(batch)
    mark("phase backward")
    running.backward(loss)
    mark("phase optimizer")
    running.optimizer.step()
    running.optimizer.zero_grad()


def mark_blocks(blocks: Sequence[nn.Module]) -> None:
    """Put a mark before and after each block, forward and backward, compiled or not; launches nothing."""
    for index, block in enumerate(blocks):
        block._compiled_call_impl = _marked(block._compiled_call_impl or block._call_impl, index)  # type: ignore[assignment]


def _marked(call: Callable[..., Any], index: int) -> Callable[..., Any]:
    def run(x: Tensor, *rest: Any, **named: Any) -> Any:
        if index == 0 and x.requires_grad:  # the input of any other block is the output of the block before
            x.register_hook(lambda grad: mark(f"block {OUTSIDE}"))
        mark(f"block {index}")
        out = call(x, *rest, **named)
        mark(f"block {OUTSIDE}")
        if out.requires_grad:
            out.register_hook(lambda grad: mark(f"block {index}"))
        return out

    return run


def _peaks(running: Running, batch: Batch) -> dict[str, int]:
    found = {}

    def measured(phase: str, body: Callable[[], Any]) -> Any:
        torch.cuda.reset_peak_memory_stats()
        result = body()
        found[f"peak in {phase}"] = torch.cuda.max_memory_allocated()
        return result

    gc.collect()  # what the compiler held while it traced is no part of a step
    losses = [measured("forward", lambda: running.forward(batch))]
    measured("backward", lambda: running.backward(losses.pop()))
    measured("optimizer", running.optimizer.step)
    running.optimizer.zero_grad()
    return found


def _held(running: Running, batch: Batch) -> dict[str, int]:
    running.backward(running.forward(batch))
    found = {
        "weights": bytes_held.weights(running.bare),
        "gradients": bytes_held.gradients(running.bare),
        "optimizer": bytes_held.moments(running.optimizer) + bytes_held.masters(running.optimizer, running.bare),
    }
    running.optimizer.zero_grad()
    return found


def _host_ms(running: Running, data: Sequence[Batch]) -> float:
    start = time.perf_counter()
    running.step(data)
    return round(1e3 * (time.perf_counter() - start), 2)


def _words(records: Sequence[Record]) -> list[str]:
    return [f"{record.name} {record.info}".strip() for record in records]
