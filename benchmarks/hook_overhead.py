"""Measure the cost of our hooks: a training step with FP8TorchAO, and the same torchao code written by hand.

    python -m benchmarks.hook_overhead

By hand means: the model is converted with torchao's own ``convert_to_float8_training``, the step contains an autocast,
and Lightning's stock ``Precision`` runs the loop. On CPU a hook also casts the input, because torchao does not see CPU
autocast. Three things are counted per step: aten operations that write memory, below torchao's tensors too, Python
calls, and collectives (under DDP with one process). Counts are the same on every machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import Precision as StockFabric
from lightning.pytorch.plugins.precision import Precision as StockTrainer
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_lowprec import FP8TorchAO

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH, DEPTH, TOKENS = (64, 4, 64) if DEVICE.type == "cpu" else (2048, 8, 8192)
EMULATE = DEVICE.type == "cpu"


STEPS = 4
"""Of a fit of the Trainer."""
NAMES = "add", "add_", "copy_", "mul", "mul_", "div", "clamp", "abs", "max", "mm", "sum", "mean"
WRITING = {f"aten::{name}" for name in NAMES}


@dataclass(frozen=True)
class Step:
    """The counts of one training step."""

    aten: dict[str, int]
    calls: int
    collectives: dict[str, int]

    @classmethod
    def of(cls, calls: int, seen: profile) -> Step:
        """Return the counts of a step that was profiled, and of the Python calls of another one."""
        names = Counter(event.name for event in seen.events())
        return cls(
            {name: count for name, count in names.items() if name in WRITING},
            calls,
            {name: count for name, count in names.items() if name.startswith(("gloo:", "nccl:", "c10d::"))},
        )


class Calls:
    """Count calls of Python functions, and with ``of_c`` of C functions."""

    def __init__(self, *, of_c: bool = False) -> None:
        self.count = 0
        self._events = ("call", "c_call") if of_c else ("call",)

    def __enter__(self) -> Calls:
        sys.setprofile(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_call(self, frame: Any, event: str, _: Any) -> None:
        self.count += event in self._events


class Model(L.LightningModule):
    """A stack of linears; ``by_hand`` puts the autocast into the step."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        autocast = torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=self._trainer is None)
        with autocast if self.by_hand else nullcontext():
            out = self.layers(x.bfloat16() if self.by_hand and self._trainer is None else x)
        return out.float() if self.by_hand and self._trainer is None else out

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).float().pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def make(by_hand: bool) -> tuple[Model, Any]:
    """Return a model and the FP8 plugin; None if the model is already converted by hand."""
    model = Model(by_hand)
    if not by_hand:
        return model, FP8TorchAO(compile=False, weight_codes="per_gemm")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=EMULATE))
    if DEVICE.type == "cpu":
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda _, args: (args[0].to(torch.get_autocast_dtype("cpu")),))
    return model, None


def count(step: Callable[[], None]) -> Step:
    """Run ``step`` twice, each under one counter."""
    with Calls() as calls:
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return Step.of(calls.count, seen)


def fabric_step(by_hand: bool, strategy: Any) -> Callable[[], None]:
    """Return a function that runs one step of a Fabric loop."""
    model, plugin = make(by_hand)
    fabric = L.Fabric(
        accelerator=DEVICE.type, devices=1, strategy=strategy, plugins=StockFabric() if plugin is None else plugin
    )
    fabric.launch()
    optimizer = model.configure_optimizers()
    module, optimizer = fabric.setup(model, optimizer)
    batch = torch.randn(TOKENS, WIDTH, device=fabric.device)

    def step() -> None:
        fabric.backward(module(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


class Stepper(L.Callback):
    """Count the batches of the Trainer from inside ``fit``."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._calls = Calls()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Batch 2 counts calls, batch 3 operations and collectives."""
        if batch_idx == 2:
            self._calls.__enter__()
        elif batch_idx == 3:
            self._prof = profile(activities=[ProfilerActivity.CPU])
            self._prof.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Stop the counter that ``on_train_batch_start`` started."""
        batch_idx = args[2]
        if batch_idx == 2:
            self._calls.__exit__()
        elif batch_idx == 3:
            self._prof.__exit__(None, None, None)
            self.steps.append(Step.of(self._calls.count, self._prof))


def trainer_run(by_hand: bool, strategy: str) -> Stepper:
    """Run a fit of the counted steps."""
    stepper = Stepper()
    model, plugin = make(by_hand)
    trainer = L.Trainer(
        accelerator=DEVICE.type, devices=1, strategy=strategy, max_steps=STEPS, callbacks=[stepper], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=StockTrainer() if plugin is None else plugin,
    )  # fmt: skip
    trainer.fit(model, DataLoader([torch.randn(TOKENS, WIDTH) for _ in range(STEPS)], batch_size=None))
    return stepper


def measure(strategy: str = "auto") -> dict[str, Any]:
    """Return the counts of Trainer and Fabric, ``ours`` and ``by_hand``."""
    result: dict[str, Any] = {}
    runs = {by_hand: trainer_run(by_hand, strategy) for by_hand in (True, False)}
    result["trainer"] = {"by_hand": runs[True].steps[0], "ours": runs[False].steps[0]}
    loops = {by_hand: fabric_step(by_hand, strategy) for by_hand in (True, False)}
    for loop in loops.values():
        for _ in range(4):  # the first steps build optimizer state, decide on the device and watch the model
            loop()
    result["fabric"] = {"by_hand": count(loops[True]), "ours": count(loops[False])}
    return result


def main() -> None:
    if DEVICE.type == "cpu":
        torch.set_num_threads(1)
    results = {strategy: measure(strategy) for strategy in ("auto", "ddp")}
    print(f"{DEVICE.type}, {DEPTH} linears of {WIDTH} x {WIDTH}, {TOKENS} tokens, torch {torch.__version__}")
    for strategy, result in results.items():
        for where, row in result.items():
            ours, by_hand = row["ours"], row["by_hand"]
            print(
                f"{where:8} {strategy:5} aten ops {sum(ours.aten.values())} vs {sum(by_hand.aten.values())} by hand,"
                f" collectives {sum(ours.collectives.values())} vs {sum(by_hand.collectives.values())},"
                f" Python calls {ours.calls} vs {by_hand.calls}"
            )


if __name__ == "__main__":
    main()
