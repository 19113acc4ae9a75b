"""Who is compared: what a user would pick instead, and every name of ours; in order of value.

A name enters by itself as soon as the table of names has it; of the FP8 names with bf16 weights, ``WITH_MASTERS``
enter. A name that this machine cannot run is missing, with the reason that a user would be given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.rivals import setups, te_layers
from benchmarks.rivals.running import Job, Running
from benchmarks.rivals.values import values_exist
from lightning_lowprec.conversion.name_formats import MASTERS, split
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import availability
from lightning_lowprec.torchao.plugin import CPU_SCALES_TENSORWISE

BASELINE = "lightning bf16-mixed, compiled"
BF16_TRUE = "lightning bf16-true, compiled"
LIGHTNING_BF16 = (BASELINE, BF16_TRUE, "lightning bf16-mixed", "lightning bf16-true",
                  "lightning bf16-mixed, whole model compiled")  # fmt: skip
MAIN, MAIN_TE = "ours fp8-hybrid", "ours fp8-hybrid-te"
"""What ``fp8-hybrid`` means by torchao and by Transformer Engine."""
BF16_WEIGHTS = f"{MAIN}, bf16 weights"
"""Without float32 weights, as Lightning's bf16-true: what compares with that."""
CHUNKED, FP8_HEAD = "chunked loss", "fp8 head"
"""The loss from hidden states, with a bf16 and with an FP8 head."""
REMAINDER = f"{MAIN}-remainder"
"""bf16 weights, with exact float32 masters in two more bytes."""
EIGHT_BITS = f"{MAIN}-8bit"
FAST_BACKWARD = f"{EIGHT_BITS}, fast backward"
"""The same with moments of 8 bits."""
SHARDED = f"{MAIN}, fsdp2"
TE_COMPILED = f"{MAIN_TE}, blocks compiled"
"""What a compiler gains around Transformer Engine's layers, at each of which its graph breaks."""
BETWEEN_BF16 = "bf16 between blocks"
"""With the bf16 sums from block to block that Transformer Engine's own blocks compute."""
TE_LAYERS = "te layers"
"""Transformer Engine's own blocks."""
TE = "transformer_engine.pytorch"
BACKENDS = {"FP8TorchAO": ("torchao", "torchao.float8", "tensorwise"), "FP8TE": ("te", TE, "delayed")}
"""By plugin: how columns of the linear table begin, what must be installed, the recipe if a name has none."""
WITH_MASTERS = (
    "fp8-hybrid-remainder", "fp8-hybrid-8bit", "fp8-hybrid-sr",
    "fp8-rowwise-remainder", "fp8-hybrid-te-remainder", "fp8-current-te-remainder",
)  # fmt: skip
"""The FP8 names with bf16 weights that are compared; the others differ from them in the recipe only."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train the same model on the same data."""

    key: str
    setup: Callable[[Job], Running]
    needs: tuple[str, ...] = ()
    cuda_only: bool = False
    cudnn_attention: bool = False
    """Attention is computed by cuDNN alone, which the null GPU has not."""
    linear: str | None = None
    """Which column of the linear table its FP8 layers are."""
    name: str | None = None
    """The name of ours."""

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on ``device``, or None."""
        reason = missing_library(self.needs)
        if reason is not None:
            return reason
        if self.name is not None:
            verdict = availability(self.name, device)
            return None if verdict.runs else verdict.reason
        if self.cuda_only and device.type != "cuda":
            return "needs a CUDA GPU"
        if self.cudnn_attention and not values_exist():
            return "needs cuDNN's attention, which a device that computes nothing does not have"
        return cpu_refusal(self.linear or "") if device.type == "cpu" else None


def missing_library(needs: Iterable[str]) -> str | None:
    """Why one of these modules cannot be imported, or None; each is really imported."""
    for module in needs:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name is not None and error.name.partition(".")[0] == module.partition(".")[0]
            return f"{module} is not installed" if absent else f"{module} does not import: {error}"
        except Exception as error:  # a wheel for another torch raises whatever it likes
            return f"{module} does not import: {type(error).__name__}: {str(error)[:200]}"
    return None


def cpu_refusal(linear: str) -> str | None:
    """Why CPU kernels cannot compute a column of the linear table, or None."""
    if linear.startswith("torchao rowwise") and CPU_SCALES_TENSORWISE:
        return f"torch {torch.__version__} has no rowwise FP8 kernel for CPU (2.13 has)"
    return None


def contenders() -> list[Contender]:
    """Everyone, the most valuable first."""
    known = {contender.key: contender for contender in (*_rivals(), *_ours())}
    ranked = [key for key in ORDER if key in known]
    return [known[key] for key in (*ranked, *(key for key in known if key not in ORDER))]


def find(key: str) -> Contender:
    """The contender of this key."""
    return next(contender for contender in contenders() if contender.key == key)


ORDER = (
    BASELINE, MAIN, MAIN_TE, BF16_TRUE, BF16_WEIGHTS, REMAINDER, f"{REMAINDER}, {FP8_HEAD}",
    f"{EIGHT_BITS}, {FP8_HEAD}", f"{BASELINE}, {CHUNKED}", f"{BF16_TRUE}, {CHUNKED}", f"{MAIN}, {FP8_HEAD}",
    "torchao tensorwise, compiled", "te delayed", "lightning transformer-engine", "accelerate torchao, compiled",
    "accelerate te", TE_COMPILED, "ours fp8-rowwise",
    "ours fp8-current-te", "te current", "ours fp8-block-te", "te block", "lightning bf16-mixed",
    "ours fp8-rowwise-gw-hp", "ours fp8-block", "lightning bf16-true", "torchao rowwise, compiled",
    "torchao rowwise_with_gw_hp, compiled", "ours half-auto", "ours msamp-o2", "ours int8-mixed",
    f"{MAIN}, {BETWEEN_BF16}", f"{TE_LAYERS} delayed", f"{TE_LAYERS} current", f"{TE_LAYERS} delayed, compiled",
)  # fmt: skip
"""The most valuable first; others follow."""


def _rivals() -> list[Contender]:
    whole = partial(setups.whole_model, precision="bf16-mixed")
    return [
        *(_lightning(precision, compiled) for precision in ("bf16-mixed", "bf16-true") for compiled in (True, False)),
        _by_te("lightning transformer-engine", setups.lightning, precision="transformer-engine", compiled=False),
        Contender(key=LIGHTNING_BF16[-1], setup=whole, needs=("lightning",)),
        _by_te("accelerate te", setups.accelerate, backend="te"),
        Contender(
            key="accelerate torchao, compiled",
            setup=partial(setups.accelerate, backend="torchao"),
            needs=("accelerate", "torchao.float8"),
            linear="torchao tensorwise",
        ),
        *(
            Contender(
                key=f"torchao {recipe}, compiled",
                setup=partial(setups.torchao, recipe=recipe),
                needs=("torchao.float8",),
                linear=f"torchao {recipe}",
            )
            for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        ),
        *(
            _by_te(f"te {recipe}", setups.transformer_engine, recipe=recipe)
            for recipe in ("delayed", "current", "block")
        ),
        _by_te(f"{TE_LAYERS} delayed", te_layers.te_layers, recipe="delayed"),
        _by_te(f"{TE_LAYERS} current", te_layers.te_layers, recipe="current"),
        _by_te(f"{TE_LAYERS} delayed, compiled", te_layers.te_layers, recipe="delayed", compiled=True),
        _by_te(f"{TE_LAYERS} delayed, fp8 attention", te_layers.te_layers, recipe="delayed", fp8_attention=True),
    ]


def _lightning(precision: str, compiled: bool) -> Contender:
    return Contender(
        key=f"lightning {precision}{', compiled' if compiled else ''}",
        setup=partial(setups.lightning, precision=precision, compiled=compiled),
        needs=("lightning",),
    )


def _by_te(key: str, setup: Callable[..., Running], **options: Any) -> Contender:
    """Whose layers are Transformer Engine's, with delayed scales if ``options`` name no recipe."""
    library = key.partition(" ")[0]
    return Contender(
        key=key,
        setup=partial(setup, **options),
        needs=(library, TE) if library in ("lightning", "accelerate") else (TE,),
        cuda_only=True,
        linear=f"te {options.get('recipe', 'delayed')}",
        cudnn_attention=options.get("fp8_attention", False),
    )


def _ours() -> list[Contender]:
    found: dict[str, Contender] = {}
    for name, entry in TABLE.items():
        stem, suffix = split(name)
        if suffix in MASTERS and stem in TABLE and name not in WITH_MASTERS:
            continue
        identity = f"{entry.plugin.__name__} {sorted(entry.options.items())}"
        found.setdefault(identity, _named(f"ours {name}", name))
    te, torchao = MAIN_TE.removeprefix("ours "), MAIN.removeprefix("ours ")
    compiled = _named(TE_COMPILED, te)
    forms = [
        replace(compiled, setup=partial(setups.lightning, precision=te, compiled=True)),
        _named(BF16_WEIGHTS, torchao, options={"weights": "keep"}),
        _named(f"{MAIN}, {BETWEEN_BF16}", torchao, setup=setups.bf16_between_blocks),
        _named(SHARDED, torchao, strategy="fsdp2"),
    ]
    return [*found.values(), *forms, *_with_losses(torchao)]


def _with_losses(torchao: str) -> list[Contender]:
    """The head and the loss of ours, under bf16 too: any user of bf16 may have it."""
    main, remainder = _named(MAIN, torchao), _named(REMAINDER, torchao, options={"master_weights": "remainder"})
    fast = [_named(FAST_BACKWARD, torchao, options={"fast_accum": "all", "master_weights": "8bit"})]
    fp8 = [
        main,
        _named(BF16_WEIGHTS, torchao, options={"weights": "keep"}),
        remainder,
        _named(EIGHT_BITS, torchao, options={"master_weights": "8bit"}),
    ]
    chunked = [_lightning("bf16-mixed", compiled=True), _lightning("bf16-true", compiled=True), main, remainder]
    return [
        replace(c, key=f"{c.key}, {words}", setup=partial(setups.with_loss, setup=c.setup, loss=loss))
        for words, loss, contenders in (
            (CHUNKED, "chunked", chunked),
            (FP8_HEAD, "fp8", fp8),
            (FP8_HEAD, "fp8 fast", fast),
        )
        for c in contenders
    ]


def _named(key: str, name: str, setup: Callable[..., Running] = setups.ours, **options: Any) -> Contender:
    """A name of our table, or another form of it."""
    entry, made = TABLE[name], partial(setup, name=name, **options)
    if entry.plugin.__name__ not in BACKENDS:
        return Contender(key=key, setup=made, name=name)
    backend, module, usual = BACKENDS[entry.plugin.__name__]
    recipe = entry.options.get("recipe", usual)
    return Contender(key=key, setup=made, needs=(module,), linear=f"{backend} {recipe}", name=name)
