"""``step8b``: whole training steps, tokens per second, memory, loss; every contender in a fresh process."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu_lane import measure, models
from benchmarks.gpu_lane.contenders import BASELINE, contenders, find
from benchmarks.gpu_lane.item import Item, stage
from benchmarks.gpu_lane.kernel_times import profiled
from benchmarks.gpu_lane.models import step_size
from benchmarks.gpu_lane.running import Job, Running, low_precision_layers
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.setups import HEAD
from lightning_lowprec.conversion.plan import Plan, make_plan
from lightning_lowprec.tools.planning.costs import flops

AGAIN = " (again)"
"""The baseline once more, last: how far the machine drifted meanwhile."""
WARM_STEPS = 4


class Steps:
    """The part."""

    name = "step8b"

    def items(self, settings: Settings) -> list[Item]:
        device = settings.torch_device
        found = [
            Item(
                key=contender.key, seconds=35.0 if not settings.smoke else 2.0, limit=150.0, fresh=True,
                needs=contender.needs, missing=contender.missing(device),
            )
            for contender in contenders()
        ]  # fmt: skip
        return [*found, replace(found[0], key=BASELINE + AGAIN)]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        return train(key.removesuffix(AGAIN), *step_size(settings), settings)


def train(key: str, shape: models.Shape, batch: int, settings: Settings) -> dict[str, Any]:
    """Train one contender for ``settings.steps`` steps and say everything about it."""
    device, contender = settings.torch_device, find(key)
    measure.forget(device)
    stage("set up", batch=batch)
    made: list[Running] = []
    job = Job(shape=shape, device=device, compile=settings.compile, tokens=batch * shape.sequence)
    setup_s = measure.seconds(lambda: made.append(contender.setup(job)), device)
    running = made.pop()
    data = models.batches(shape, batch, device)
    figures: dict[str, Any] = {
        "batch": batch, "layers": shape.layers, "tokens": batch * shape.sequence, "linear": contender.linear,
        "setup_s": setup_s, "compile": settings.compile,
    }  # fmt: skip
    stage("first step", **figures)
    figures |= timed(running, data, settings)
    figures |= measure.peak(device) | arithmetic(running, shape, figures["tokens"], figures["ms"])
    figures |= {"attention": attention_backend(shape, batch, device)} | running.notes
    stage("profiled step", **figures)
    figures["profile"] = profiled(lambda: running.step([data[0]]), device)
    figures["headline"] = (
        f"{figures['tokens_per_s']:.0f} tokens/s, {figures['ms']:.1f} ms, loss {figures['losses'][-1]:.4f},"
        f" peak {figures.get('peak_bytes', 0) / 1e9:.1f} GB, first step {figures['first_step_s']:.0f} s"
    )
    return figures


def timed(running: Running, data: list[Any], settings: Settings) -> dict[str, Any]:
    """The first step (it compiles), a few warm ones, then the timed ones."""
    device, losses = settings.torch_device, []

    def step(index: int) -> None:
        losses.append(running.step([data[index % len(data)]]))

    first = measure.seconds(lambda: step(0), device)
    stage("warm-up", first_step_s=first)
    warm = min(WARM_STEPS, settings.steps - 1)
    warm_s = [measure.seconds(lambda index=index: step(index), device) for index in range(1, warm)]
    stage("timed steps", warm_step_s=warm_s)
    times, wall = measure.steps(lambda index: step(index + warm), settings.steps - warm, device)
    ms = statistics.median(times)
    tokens = data[0][0].numel()
    return {
        "first_step_s": first,
        "steps": settings.steps,
        "tokens_per_s": tokens / ms * 1e3,
        "wall_tokens_per_s": tokens * len(times) / wall * 1e3,
        **measure.summary(times),
        "losses": [float(loss) for loss in losses],
    }


def arithmetic(running: Running, shape: models.Shape, tokens: int, ms: float) -> dict[str, Any]:
    """How many matrix FLOPs there are, which share of them runs in FP8, and in which shapes."""
    with torch.device("meta"):
        original = models.Llama(shape)
    low = {fqn.removeprefix("_orig_mod.") for fqn in low_precision_layers(running.bare)}
    rows = [replace(row, kept_because=None if row.fqn in low else "high precision") for row in make_plan(original).rows]
    found = flops(Plan(tuple(rows)), attention_width=shape.attention_width, sequence_length=shape.sequence)
    total = found.fp8 + found.high_precision + found.attention
    shapes: dict[str, int] = {}
    for row in rows:
        if row.kept_because is None:
            name = f"{row.in_features}x{row.out_features}"
            shapes[name] = shapes.get(name, 0) + 1
    return {
        "fp8_share": found.fp8_share,
        "fp8_layers": len(low),
        "fp8_head": HEAD in low,
        "weights": _dtype_of_weights(running, low),
        "fp8_shapes": shapes,
        "matrix_flops_per_token": total,
        "matrix_tflops": total * tokens / ms / 1e9,
        "parameters": shape.parameters,
    }


def _dtype_of_weights(running: Running, low: set[str]) -> str:
    """``"float32"`` or ``"bfloat16"``: of the FP8 layers, or of all Linears where there are none, or of matrices."""
    layers = {fqn.removeprefix("_orig_mod."): module for fqn, module in running.bare.named_modules()}
    found = [m.weight.dtype for fqn, m in layers.items() if fqn in low or (not low and isinstance(m, torch.nn.Linear))]
    found = found or [p.dtype for p in running.bare.parameters() if p.ndim == 2]
    return str(found[0]).removeprefix("torch.")


def attention_backend(shape: models.Shape, batch: int, device: torch.device) -> str:
    """The backend that torch chooses for the block's attention in bf16, such as ``"CUDNN_ATTENTION"``."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        torch.empty(batch, count, shape.sequence, shape.head_dim, device=device, dtype=torch.bfloat16)
        for count in heads
    )
    q.requires_grad_()
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return {int(backend): name for name, backend in SDPBackend.__members__.items()}.get(chosen, str(chosen))
