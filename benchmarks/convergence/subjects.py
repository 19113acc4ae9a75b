"""The models that are trained, each with its data, its length, and the precisions that it is trained under."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from benchmarks.convergence.precisions import BASELINE, Precisions

Choice = Literal["every", "without suffix", "control"]
CONTROL: Final = (BASELINE, "bf16-true", "bf16-master", "bf16-sr")
"""Of the positive control: weights in bf16 whose updates are lost, kept in masters, and rounded stochastically."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model with its data; ``base`` makes the weights that a fine-tune begins with."""

    key: str
    title: str
    model: str
    model_args: Mapping[str, Any]
    data: str = "lightning_lowprec.tools.demo.StdlibText"
    data_args: Mapping[str, Any] = field(default_factory=dict)
    steps: int
    choice: Choice = "every"
    base: Subject | None = None

    @property
    def reads_text(self) -> bool:
        """Whether the data are windows of a text."""
        return self.data.endswith("Text")

    def chosen(self, precisions: Precisions) -> tuple[str, ...]:
        """Return the precisions of this subject, the baseline first."""
        return {"every": precisions.names, "without suffix": precisions.without_suffix, "control": CONTROL}[self.choice]


def committed(steps: int | None = None) -> list[Subject]:
    """Return the subjects in the size whose results are committed, or with another number of steps."""
    return _subjects(steps=STEPS if steps is None else dict.fromkeys(STEPS, steps), width=64, depth=2, val_windows=256)


def smoke() -> list[Subject]:
    """Return two subjects in a size that takes seconds."""
    wanted = ("llama", "lora")
    return [subject for subject in _subjects(steps=SMOKE, width=16, depth=1, val_windows=16) if subject.key in wanted]


STEPS: Final = {"gpt": 180, "llama": 140, "vit": 200, "lora": 80, "base": 400, "control": 120}
SMOKE: Final = dict.fromkeys(STEPS, 6)
LEARNING_RATES: Final = {"gpt": 4e-3, "llama": 5e-3, "vit": 2e-3, "lora": 5e-3, "base": 4e-3, "control": 1e-4}
_LLAMA: Final = "benchmarks.convergence.models.ByteLlama"
_GPT: Final = "benchmarks.convergence.models.DecayedGPT"


def _subjects(*, steps: Mapping[str, int], width: int, depth: int, val_windows: int) -> list[Subject]:
    sizes = {"depth": depth, "width": width, "heads": 2 if width < 64 else 4}
    text = {"block_size": 64, "batch_size": 8, "val_windows": val_windows}
    language = {**sizes, "block_size": 64}

    def lr(key: str) -> dict[str, float]:
        return {"lr": LEARNING_RATES[key], "steps": steps[key]}

    def data(key: str) -> dict[str, int]:
        return {**text, "train_windows": text["batch_size"] * steps[key]}

    base = Subject(
        key="base",
        title="Llama, base of the fine-tune",
        model=_LLAMA,
        model_args={**language, **lr("base")},
        data_args=data("base"),
        steps=steps["base"],
    )
    return [
        Subject(key="gpt", title="byte-level GPT", model=_GPT, model_args={**language, **lr("gpt")},
                data_args=data("gpt"), steps=steps["gpt"]),
        Subject(key="llama", title="Llama", model=_LLAMA, model_args={**language, **lr("llama")},
                data_args=data("llama"), steps=steps["llama"]),
        Subject(key="vit", title="ViT on rendered digits", model="benchmarks.convergence.models.DigitViT",
                model_args={**sizes, "patch": 7, **lr("vit")}, data="benchmarks.convergence.digits.Digits",
                data_args={"batch_size": 32, "train_pictures": 32 * steps["vit"], "val_pictures": 2 * val_windows},
                steps=steps["vit"], choice="without suffix"),
        Subject(key="lora", title="LoRA fine-tune of a Llama", model="benchmarks.convergence.models.LoraLlama",
                model_args={**language, "rank": 8, **lr("lora")},
                data="benchmarks.convergence.text.HeaderText", data_args=data("lora"),
                steps=steps["lora"], choice="without suffix", base=base),
        Subject(key="control", title="positive control: the GPT with a small learning rate", model=_GPT,
                model_args={**language, **lr("control")}, data_args=data("control"), steps=steps["control"],
                choice="control"),
    ]  # fmt: skip
