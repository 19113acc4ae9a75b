"""Who is compared: what a user would pick instead, and every name of ours; in order of value.

A name enters by itself as soon as the table of names has it; of the FP8 names with bf16 weights, ``WITH_MASTERS``
enter. A name that this machine cannot run is missing, with the reason that a user would be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_lane import setups, te_layers
from benchmarks.gpu_lane.item import missing_library
from benchmarks.gpu_lane.running import Job, Running
from benchmarks.gpu_lane.values import values_exist
from lightning_lowprec.conversion.name_suffixes import MASTERS, split
from lightning_lowprec.names import TABLE, without_backend
from lightning_lowprec.tools.doctor import availability
from lightning_lowprec.torchao.fp8 import CPU_SCALES_TENSORWISE

BASELINE = "lightning bf16-mixed, compiled"
BF16_TRUE = "lightning bf16-true, compiled"
LIGHTNING_BF16 = (BASELINE, BF16_TRUE, "lightning bf16-mixed", "lightning bf16-true",
                  "lightning bf16-mixed, whole model compiled")  # fmt: skip
MAIN, MAIN_TE = "ours fp8-tensorwise", "ours fp8-hybrid-te"
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
SCALED_INSIDE = "ours fp8-rowwise, scaled inside"
"""What the kernel that scales by itself gains over torchao's way of scaling afterwards."""
TE_COMPILED = f"{MAIN_TE}, blocks compiled"
"""What a compiler gains around Transformer Engine's layers, at each of which its graph breaks."""
BETWEEN_BF16 = "bf16 between blocks"
"""With the bf16 sums from block to block that Transformer Engine's own blocks compute."""
TE_LAYERS = "te layers"
"""Transformer Engine's own blocks."""
TE = "transformer_engine.pytorch"
WITH_MASTERS = (
    "fp8-tensorwise-remainder", "fp8-tensorwise-master", "fp8-tensorwise-8bit", "fp8-tensorwise-sr",
    "fp8-rowwise-remainder", "fp8-hybrid-te-remainder", "fp8-current-remainder",
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
    "accelerate te", "ours fp8-tensorwise, min_gain=auto", TE_COMPILED, "ours fp8-rowwise", SCALED_INSIDE,
    "ours fp8-current", "te current", "ours fp8-block-te", "te block", "lightning bf16-mixed", "ours fp8-rowwise-gw-hp",
    "ours fp8-block-torchao", "lightning bf16-true", "torchao rowwise, compiled", "ours half-auto", "ours msamp-o2",
    "ours int8-mixed", f"{MAIN}, {BETWEEN_BF16}", f"{TE_LAYERS} delayed", f"{TE_LAYERS} current",
    f"{TE_LAYERS} delayed, compiled",
)  # fmt: skip
"""The first three settle what ``fp8-hybrid`` should mean, then the targets' come.

A call of a few minutes comes as far as the fifteenth or so, the next call goes on.
"""


def _rivals() -> list[Contender]:
    found = [
        Contender(
            key=f"lightning {precision}{', compiled' if compiled else ''}",
            setup=partial(setups.lightning, precision=precision, compiled=compiled),
            needs=("lightning",),
        )
        for precision in ("bf16-mixed", "bf16-true")
        for compiled in (True, False)
    ]
    found.append(
        Contender(
            key="lightning transformer-engine",
            setup=partial(setups.lightning, precision="transformer-engine", compiled=False),
            needs=("lightning", TE),
            cuda_only=True,
            linear="te delayed",
        )
    )
    whole = partial(setups.whole_model, precision="bf16-mixed")
    found.append(Contender(key=LIGHTNING_BF16[-1], setup=whole, needs=("lightning",)))
    return [*found, *_beside_lightning()]


def _beside_lightning() -> list[Contender]:
    found = [
        Contender(
            key="accelerate te",
            setup=partial(setups.accelerate, backend="te"),
            needs=("accelerate", TE),
            cuda_only=True,
            linear="te delayed",
        ),
        Contender(
            key="accelerate torchao, compiled",
            setup=partial(setups.accelerate, backend="torchao"),
            needs=("accelerate", "torchao.float8"),
            linear="torchao tensorwise",
        ),
    ]
    found += [
        Contender(
            key=f"torchao {recipe}, compiled",
            setup=partial(setups.torchao, recipe=recipe),
            needs=("torchao.float8",),
            linear=f"torchao {recipe}",
        )
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    ]
    found += [
        Contender(
            key=f"te {recipe}", setup=partial(setups.transformer_engine, recipe=recipe), needs=(TE,), cuda_only=True,
            linear=f"te {recipe}",
        )
        for recipe in ("delayed", "current", "block")
    ]  # fmt: skip
    return [*found, *_te_layers()]


def _te_layers() -> list[Contender]:
    forms: dict[str, dict[str, Any]] = {
        f"{TE_LAYERS} delayed": {"recipe": "delayed"},
        f"{TE_LAYERS} current": {"recipe": "current"},
        f"{TE_LAYERS} delayed, compiled": {"recipe": "delayed", "compiled": True},
        f"{TE_LAYERS} delayed, fp8 attention": {"recipe": "delayed", "fp8_attention": True},
    }
    return [
        Contender(
            key=key, setup=partial(te_layers.te_layers, **form), needs=(TE,), cuda_only=True,
            linear=f"te {form['recipe']}", cudnn_attention=form.get("fp8_attention", False),
        )
        for key, form in forms.items()
    ]  # fmt: skip


def _ours() -> list[Contender]:
    found: dict[str, Contender] = {}
    for name, entry in TABLE.items():
        stem, suffix = split(name)
        if without_backend(name):  # means one of the names with a backend
            continue
        if suffix in MASTERS and stem in TABLE and name not in WITH_MASTERS:
            continue
        identity = f"{entry.plugin.__name__} {sorted(entry.options.items())}"
        found.setdefault(
            identity,
            Contender(
                key=f"ours {name}", setup=partial(setups.ours, name=name), needs=_needs(entry.plugin.__name__),
                linear=_linear(entry.plugin.__name__, entry.options), name=name,
            ),
        )  # fmt: skip
    by_gain = Contender(
        key="ours fp8-tensorwise, min_gain=auto",
        setup=partial(setups.ours, name="fp8-tensorwise", options={"min_gain": "auto"}),
        needs=("torchao.float8",),
    )
    inside = Contender(
        key=SCALED_INSIDE,
        setup=partial(setups.ours, name="fp8-rowwise", options={"rowwise_backward": "scaled_inside"}),
        needs=("torchao.float8",), linear="torchao rowwise", name="fp8-rowwise",
    )  # fmt: skip
    return [*found.values(), by_gain, inside, *_of_fp8_hybrid(), _sharded(), *_with_losses()]


def _of_fp8_hybrid() -> list[Contender]:
    """Other forms of what ``fp8-hybrid`` means."""
    te, torchao = MAIN_TE.removeprefix("ours "), MAIN.removeprefix("ours ")
    by_te: dict[str, Any] = {"needs": (TE,), "linear": "te delayed", "name": te}
    compiled = partial(setups.lightning, precision=te, compiled=True)
    kept = partial(setups.ours, name=torchao, options={"weights": "keep"})
    by_torchao: dict[str, Any] = {"needs": ("torchao.float8",), "linear": "torchao tensorwise", "name": torchao}
    between = partial(setups.bf16_between_blocks, name=torchao)
    return [
        Contender(key=TE_COMPILED, setup=compiled, **by_te),
        Contender(key=BF16_WEIGHTS, setup=kept, **by_torchao),
        Contender(key=f"{MAIN}, {BETWEEN_BF16}", setup=between, **by_torchao),
    ]


def _with_losses() -> list[Contender]:
    """The head and the loss of ours, under bf16 too: any user of bf16 may have it."""
    torchao = MAIN.removeprefix("ours ")
    exact, eight = (partial(setups.ours, name=torchao, options={"master_weights": w}) for w in ("remainder", "8bit"))
    kept = partial(setups.ours, name=torchao, options={"weights": "keep"})
    all_fast = {"recipe": {"*": {"grad_input": "fast", "grad_weight": "fast"}}, "master_weights": "8bit"}
    fast = partial(setups.ours, name=torchao, options=all_fast)
    bf16: dict[str, partial[Running]] = {
        BASELINE: partial(setups.lightning, precision="bf16-mixed", compiled=True),
        BF16_TRUE: partial(setups.lightning, precision="bf16-true", compiled=True),
    }
    fp8 = {
        MAIN: partial(setups.ours, name=torchao),
        BF16_WEIGHTS: kept,
        REMAINDER: exact,
        EIGHT_BITS: eight,
        FAST_BACKWARD: fast,
    }
    ours: dict[str, Any] = {"needs": ("torchao.float8",), "linear": "torchao tensorwise", "name": torchao}
    with_bf16_head = bf16 | {key: fp8[key] for key in (MAIN, REMAINDER)}
    chunked = {key: partial(setups.with_loss, setup=setup, loss="chunked") for key, setup in with_bf16_head.items()}
    in_fp8 = {key: partial(setups.with_loss, setup=setup, loss="fp8") for key, setup in fp8.items()}
    return [
        *(Contender(key=f"{k}, {CHUNKED}", setup=s, **(ours if k in fp8 else {})) for k, s in chunked.items()),
        *(Contender(key=f"{k}, {FP8_HEAD}", setup=s, **ours) for k, s in in_fp8.items()),
    ]


def _sharded() -> Contender:
    """FP8 under FSDP2 with one process: all of its work but what goes over the wire."""
    return Contender(
        key=SHARDED,
        setup=partial(setups.ours, name=MAIN.removeprefix("ours "), strategy="fsdp2"),
        needs=("torchao.float8",),
        linear="torchao tensorwise",
    )


def _needs(plugin: str) -> tuple[str, ...]:
    return {"FP8TorchAO": ("torchao.float8",), "FP8TE": (TE,)}.get(plugin, ())


def _linear(plugin: str, options: Any) -> str | None:
    backend = {"FP8TorchAO": "torchao", "FP8TE": "te"}.get(plugin)
    if backend is None:
        return None
    return f"{backend} {options.get('recipe', 'tensorwise' if backend == 'torchao' else 'delayed')}"
