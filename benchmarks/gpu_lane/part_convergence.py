"""``convergence``: a model of 124 million parameters, trained by each contender for the same number of seconds.

Same text, same order, same initial weights, same learning rates, and the model's own logits and cross-entropy for all.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_lane import corpus as text
from benchmarks.gpu_lane import measure
from benchmarks.gpu_lane.contenders import BASELINE, BF16_TRUE, MAIN, MAIN_TE, contenders, find
from benchmarks.gpu_lane.device_state import watched
from benchmarks.gpu_lane.item import TIMEOUT, Item, missing_library, stage
from benchmarks.gpu_lane.part_steps import arithmetic
from benchmarks.gpu_lane.results import CUT_SHORT
from benchmarks.gpu_lane.running import Job
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.sizes import convergence_size
from benchmarks.gpu_lane.timed_training import Schedule, Windows, train
from benchmarks.gpu_lane.values import time_limit, values_exist

TEXT = "text"
SEED = ", seed "
CONTENDERS = (
    BASELINE, MAIN, "ours fp8-rowwise", MAIN_TE, "ours fp8-current", "ours bf16-master", "ours msamp-o2",
    "ours int8-mixed", "ours fp8-block", BF16_TRUE,
)  # fmt: skip
"""The first six fit into a call of ten minutes; what a call does not reach, the next call does."""
SPARE = 25.0
"""Seconds that a run takes beside training: set-up, compilation, validation. An estimate: no GPU has run this yet."""
TEXT_SECONDS = 40.0
"""The text takes about two minutes of one CPU core, most of which all cores share."""
VAL_WINDOWS = 128
VAL_BATCHES_OF_TOYS = 4
TO_END = 10.0
"""Seconds before a run would be killed, at which it ends by itself and is measured again by the next call."""
ADAMW = {"lr": Schedule.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Convergence:
    """The part."""

    name = "convergence"

    def items(self, settings: Settings) -> list[Item]:
        device, known = settings.torch_device, {contender.key: contender for contender in contenders()}
        no_text = missing_library(("tokenizers",))
        spare = 1.0 if settings.smoke else SPARE
        seconds = spare + (0.0 if settings.smoke else settings.seconds)
        runs = [
            Item(
                key=f"{key}{SEED}{seed}", seconds=seconds, limit=settings.seconds + 180.0, fresh=True,
                needs=known[key].needs, missing=known[key].missing(device) or no_text,
            )
            for seed in range(settings.seeds)
            for key in CONTENDERS
        ]  # fmt: skip
        return [Item(key=TEXT, seconds=1.0 if settings.smoke else TEXT_SECONDS, limit=400.0, missing=no_text), *runs]

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        if key == TEXT:
            facts = tokens(settings).facts
            counts = f"{facts['train_tokens']} and {facts['val_tokens']} tokens"
            return facts | {"headline": f"{counts} of {facts['vocabulary']}, digest {facts['digest'][:16]}"}
        name, _, seed = key.rpartition(SEED)
        return converge(name, int(seed), settings)


def tokens(settings: Settings) -> text.Corpus:
    """Return the tokens, from the file beside the output folder if an earlier item or call made them."""
    size = text.TOY if settings.smoke else text.Size()
    return text.corpus(size, None if settings.out is None else Path(settings.out))


def schedule(settings: Settings) -> Schedule:
    """Return how long runs are; where no time passes, and for toy sizes, ``settings.steps`` steps."""
    until = time.monotonic() + float(os.environ.get(TIMEOUT, time_limit(settings.seconds + 180.0))) - TO_END
    if settings.smoke:
        return Schedule(seconds=time_limit(600.0), steps=settings.steps, chunk=2, every=2, warm_up=2, until=until)
    return Schedule(
        seconds=time_limit(settings.seconds), steps=None if values_exist() else settings.steps, until=until
    )  # fmt: skip


def converge(key: str, seed: int, settings: Settings) -> dict[str, Any]:
    """Train one contender, and say everything about it."""
    device, contender, plan = settings.torch_device, find(key), schedule(settings)
    shape, batch = convergence_size(settings)
    measure.forget(device)
    stage("text", batch=batch)
    corpus = tokens(settings)
    job = Job(
        shape=shape, device=device, compile=settings.compile, tokens=batch * shape.sequence, seed=seed,
        optimizer_options=ADAMW,
    )  # fmt: skip
    stage("set up")
    start = time.perf_counter()
    running = contender.setup(job)
    measure.synchronize(device)
    figures: dict[str, Any] = {
        "batch": batch, "layers": shape.layers, "tokens": batch * shape.sequence, "seed": seed,
        "linear": contender.linear, "setup_s": time.perf_counter() - start, "compile": settings.compile,
        "text": corpus.facts["digest"], "text_tokens": corpus.facts["tokens_digest"],
        "model": shape.name, "learning_rate": plan.learning_rate,
        "warm_up": plan.warm_up, "budget_s": plan.seconds,
    }  # fmt: skip
    stage("first steps", **figures)
    val_batches = VAL_BATCHES_OF_TOYS if settings.smoke else max(1, VAL_WINDOWS // batch)
    data = Windows(
        corpus, sequence=shape.sequence, batch=batch, val_batches=val_batches, seed=seed, device=device
    )  # fmt: skip
    with watched(device) as state:
        figures |= train(running, data, plan, device)
    figures[CUT_SHORT] = figures.pop("cut_short")
    figures |= measure.peak(device) | arithmetic(running, shape, figures["tokens"], figures["ms"])
    figures |= {"device_state": state, "epochs": figures["steps"] / data.batches_per_epoch} | running.notes
    figures["tokens_per_s"] = figures["tokens"] / figures["ms"] * 1e3
    end = "diverged" if figures["diverged"] else f"validation loss {figures['points'][-1][2]:.4f}"
    figures["headline"] = (
        f"{end} after {figures['steps']} steps, {figures['training_s']:.1f} s; {figures['ms']:.1f} ms per step,"
        f" {figures['tokens_per_s']:.0f} tokens/s, compilation {figures['compile_s']:.0f} s"
    )
    return figures
