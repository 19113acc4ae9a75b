"""``optimizer``: one AdamW step on float32 masters against plain float32 AdamW, foreach and fused.

The parameters are those of a Llama of a billion, without the model: gradients are random and new before every step,
since ours take them over. Ours and plain are timed in turn in one process; weights are bf16 in ours, float32 in plain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_lane import measure, models
from benchmarks.gpu_lane.item import Item, stage
from benchmarks.gpu_lane.running import LEARNING_RATE
from benchmarks.gpu_lane.settings import Settings
from benchmarks.hook_overhead import Ops
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.masters.optimizer import add_masters

FORMS = {
    "fp32": MasterConfig(form="fp32"),
    "remainder": MasterConfig(form="remainder"),
    "stochastic": MasterConfig(form="stochastic"),
}
KINDS = ("fused", "foreach")
CALLS = "calls"
VIEWS = ("aten.as_strided.", "aten.detach.")
"""Operations that launch nothing."""
DEPTHS = (2, 4)
"""Layers of the toy model whose steps are counted: the number of calls should not depend on it."""
WARM_STEPS = 3
SAMPLE_SECONDS = 2.0
"""Time for the samples of one form, plain ones included."""


class OptimizerSteps:
    """The part."""

    name = "optimizer"

    def items(self, settings: Settings) -> list[Item]:
        keys = [CALLS, *(f"{form}, {kind}" for kind in KINDS for form in FORMS)]
        return [Item(key=key, seconds=1.0 if settings.smoke else 15.0, limit=120.0) for key in keys]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        if key == CALLS:
            return calls(settings.torch_device)
        form, _, kind = key.rpartition(", ")
        return against_plain(form, kind, models.TOY if settings.smoke else models.SHAPES["1b"], settings)


class Stepper:
    """Parameters of ``shape`` and their optimizer; plain float32 if ``form`` is None."""

    def __init__(self, shape: models.Shape, device: torch.device, kind: str, form: str | None) -> None:
        with torch.device("meta"):
            sizes = [p.shape for p in models.Llama(shape).parameters()]
        torch.manual_seed(0)
        dtype = torch.float32 if form is None else torch.bfloat16
        self.params = [nn.Parameter(torch.randn(s, device=device, dtype=dtype).mul_(models.INIT_STD)) for s in sizes]
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, **{kind: True})  # type: ignore[arg-type]
        if form is not None:
            add_masters(self.optimizer, FORMS[form])

    def new_gradients(self) -> None:
        """As after a backward; nothing else holds them."""
        for p in self.params:
            p.grad = torch.randn_like(p)

    def step(self) -> None:
        """What is timed."""
        self.optimizer.step()

    def timed(self, device: torch.device, host: float = 0.0) -> tuple[float, float]:
        """Milliseconds of one step on the device, and of the host to launch it; ``host``: of a warm one before."""
        self.new_gradients()
        found = measure.device_and_host(self.step, device, host)
        self.optimizer.zero_grad()
        return found

    def warm(self, device: torch.device) -> float:
        """Milliseconds that the host takes to launch a warm step, by the fastest of a few."""
        hosts = []
        for _ in range(WARM_STEPS):
            self.new_gradients()
            hosts.append(measure.host_ms(self.step, device))
            self.optimizer.zero_grad()
        return min(hosts)


def against_plain(form: str, kind: str, shape: models.Shape, settings: Settings) -> dict[str, Any]:
    """Time and memory of a step of one form, and of plain float32 with the same implementation."""
    device = settings.torch_device
    steppers: dict[str, Stepper] = {}
    found: dict[str, Any] = {"ours": {}, "plain": {}}
    slowest = 0.0
    for name, masters in (("ours", form), ("plain", None)):
        stage(f"set up {name}", **found)
        measure.forget(device)
        before = measure.allocated(device) or 0
        stepper = steppers[name] = Stepper(shape, device, kind, masters)
        host = stepper.warm(device)
        slowest += stepper.timed(device, host)[0]
        found[name] |= {"host_ms": host, "sleep_ms": measure.sleep_ms(host)} | held(stepper, before, device)
    stage("timing", **found)
    rounds = 3 if settings.smoke else measure.rounds_within(slowest, SAMPLE_SECONDS, 10, 40)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    for _ in range(rounds + 1):
        for name, stepper in steppers.items():
            samples[name].append(stepper.timed(device, found[name]["host_ms"]))
    for name, (_, *taken) in samples.items():  # the first of each takes memory from the device
        found[name] |= measure.summary([ms for ms, _ in taken])
    ratio = found["ours"]["ms"] / found["plain"]["ms"]
    headline = f"{found['ours']['ms']:.2f} ms, plain float32 {found['plain']['ms']:.2f} ms: {ratio:.3f}x"
    tensors, parameters = len(stepper.params), sum(p.numel() for p in stepper.params)
    steppers.clear()
    del stepper
    measure.forget(device)
    return {**found, "ratio": ratio, "tensors": tensors, "parameters": parameters, "headline": headline}


def held(stepper: Stepper, before: int, device: torch.device) -> dict[str, float]:
    """Bytes per parameter between backward and step, and at most within the step; nothing on CPU."""
    stepper.new_gradients()
    if device.type != "cuda":
        stepper.step()
        return {}
    measure.forget(device)
    resting = torch.cuda.memory_allocated(device) - before
    stepper.step()
    torch.cuda.synchronize(device)
    most = torch.cuda.max_memory_allocated(device) - before
    parameters = sum(p.numel() for p in stepper.params)
    stepper.optimizer.zero_grad()
    return {"rest_bytes_per_parameter": resting / parameters, "peak_bytes_per_parameter": most / parameters}


def calls(device: torch.device) -> dict[str, Any]:
    """aten calls of one step by implementation and form, for models of several depths: host work, on every machine."""
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for kind in KINDS:
        for form in (None, *FORMS):
            for depth in DEPTHS:
                stepper = Stepper(replace(models.TOY, layers=depth), device, kind, form)
                for _ in range(2):
                    stepper.timed(device)
                stepper.new_gradients()
                with Ops() as ops:
                    stepper.step()
                row = rows.setdefault(f"{form or 'plain'}, {kind}", {})
                launched = [count for name, count in ops.counts.items() if not name.startswith(VIEWS)]
                row[str(len(stepper.params))] = sum(launched)
    more = {key: {n: row[n] - rows[f"plain, {key.rpartition(', ')[2]}"][n] for n in row} for key, row in rows.items()}
    growing = [key for key, row in more.items() if len(set(row.values())) > 1]
    most = max(count for row in more.values() for count in row.values())
    what = f"grow with the parameters: {', '.join(growing)}" if growing else "the same for any number of parameters"
    return {"calls": rows, "more_than_plain": more, "headline": f"at most {most} aten calls more than plain, {what}"}
