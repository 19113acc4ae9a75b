"""``loss``: a model of 124 million parameters under each precision, trained and judged as by ``lowprec compare``.

Each run is an item of the lane, with a process of its own. The report has compare's table, remarks and picture.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from benchmarks.convergence.models import adamw
from benchmarks.gpu_lane import models
from benchmarks.gpu_lane.item import Item, stage
from benchmarks.gpu_lane.results import figures_of
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import values_exist
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.compare import comparison as report
from lightning_lowprec.tools.compare.comparison import Comparison
from lightning_lowprec.tools.compare.result import PrecisionResult
from lightning_lowprec.tools.compare.spec import CompareSpec
from lightning_lowprec.tools.compare.training import fit
from lightning_lowprec.tools.doctor import availability
from lightning_lowprec.tools.output import format_table

NAMES = (
    "bf16-mixed", "fp8-hybrid", "fp8-rowwise", "fp8-hybrid-te", "fp8-current-te", "bf16-master", "msamp-o2",
    "int8-mixed", "fp8-block", "bf16-true",
)  # fmt: skip
"""The baseline first, then the most valuable: a call that ends early has the first ones."""
SEED = ", seed "
STEPS, BATCH = 300, 32
VALIDATIONS = 3
SECONDS = 45.0
"""Set-up, compilation, steps and validation of one run. An estimate: no GPU has run this yet."""


class LanguageModel(L.LightningModule):
    """The lane's decoder on bytes.

    Args:
        shape: a key of ``models.SHAPES``.
        steps: optimizer steps of the run, at whose end the learning rate is zero.
    """

    def __init__(self, shape: str, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.decoder = models.Llama(models.SHAPES[shape])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """batch: tokens and targets, both (B, T) int64 -> mean cross-entropy."""
        loss: Tensor = self.decoder(*batch)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``, in nats per byte."""
        self.log("val_loss", self.decoder(*batch))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, whose learning rate rises shortly and then falls to zero."""
        return adamw(self.parameters(), 6e-4, self.steps)


def spec_of(settings: Settings, names: tuple[str, ...] = NAMES, seeds: int = 1) -> CompareSpec:
    """Return the comparison of these names: the same bytes of Python's standard library for all."""
    shape = models.SHAPES["toy" if settings.smoke else "124m"]
    steps, batch = (settings.steps, 2) if settings.smoke else (STEPS, settings.batch or BATCH)
    return CompareSpec(
        precisions=names,
        model=f"{__name__}.LanguageModel",
        model_args={"shape": shape.name, "steps": steps},
        data="lightning_lowprec.tools.demo.StdlibText",
        data_args={
            "block_size": shape.sequence, "batch_size": batch, "max_bytes": 100_000 if settings.smoke else 30_000_000,
        },
        max_steps=steps,
        val_every=max(1, steps // VALIDATIONS),
        val_batches=4,
        accelerator=settings.device,
        seeds=seeds,
    )  # fmt: skip


class Recorded:
    """Adds the figures of a training to a result, and says how far the training is."""

    def __init__(self, result: PrecisionResult) -> None:
        self.result = result

    def send(self, message: dict[str, Any], /) -> None:
        """Take one message of the training."""
        self.result.add(message)
        if "val" in message:
            stage(f"validated after {self.result.val_steps[-1]} steps")


class Losses:
    """The part."""

    name = "loss"

    def items(self, settings: Settings) -> list[Item]:
        return [
            Item(
                key=f"{name}{SEED}{seed}", seconds=2.0 if settings.smoke else SECONDS, limit=240.0, fresh=True,
                missing=_missing(name, settings),
            )
            for seed in range(settings.seeds)
            for name in NAMES
        ]  # fmt: skip

    def run(self, key: str, settings: Settings) -> dict[str, Any]:
        name, _, seed = key.rpartition(SEED)
        result = PrecisionResult(name=name, seed=int(seed))
        try:
            fit(spec_of(settings), name, int(seed), Recorded(result).send)
        except FloatingPointError:  # a loss that is not finite
            if values_exist():
                raise
        end = result.val_losses[-1] if result.val_losses else float("nan")
        steps = len(result.train_losses)
        return {"result": asdict(result), "headline": f"validation loss {end:.4f} after {steps} steps"}


def _missing(name: str, settings: Settings) -> str | None:
    """Return why a name does not run on this device, or None."""
    if name not in TABLE:
        return None
    verdict = availability(name, settings.torch_device)
    return None if verdict.runs else verdict.reason


def comparison(data: dict[str, Any]) -> Comparison | None:
    """Return compare's comparison of the precisions that have every seed of the baseline; None without two of them."""
    runs: dict[str, dict[int, PrecisionResult]] = {}
    for found in figures_of(data, "loss").values():
        result = PrecisionResult(**found["result"])
        runs.setdefault(result.name, {})[result.seed] = result
    seeds = sorted(runs.get(NAMES[0], {}))
    names = tuple(name for name in NAMES if seeds and set(seeds) <= set(runs.get(name, {})))
    if len(names) < 2:
        return None
    settings = Settings(**{**data["parts"]["loss"]["settings"], "only": ()})
    spec = spec_of(settings, names, len(seeds))
    return Comparison(spec=spec, results=[runs[name][seed] for seed in seeds for name in names])


def section(data: dict[str, Any]) -> str:
    """Return the part of the report; empty where nothing can be compared."""
    compared = comparison(data)
    if compared is None:
        return ""
    cells, right = report.rows(compared)
    table = "\n".join(format_table(cells, right=right, markdown=True))
    steps = f"{compared.spec.max_steps} steps of {compared.spec.data_args['batch_size']} sequences"
    return "\n\n".join(
        [f"{steps}, at equal steps. {report.verdict_on_all(compared)}", table, *report.remarks(compared)]
    )
