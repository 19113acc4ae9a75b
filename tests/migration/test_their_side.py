"""The stacks that can be installed train beside ours, as the pages of migration write both, on the same data."""

from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs
from torch import nn

from lightning_lowprec import FP8TorchAO
from tests.serving.models import llama
from tests.toys import ON_CPU, Task

QUIET = {**ON_CPU, "max_steps": 2}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()


def task(model: nn.Module) -> Task:
    return Task(model, loss_of, lambda task: torch.optim.AdamW(task.parameters(), lr=1e-3, weight_decay=0.0))


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return sum((a - b).square().sum().item() for a, b in pairs) ** 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_trainer_of_transformers_and_ours_give_the_same_weights(tmp_path):
    tokens = torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    written = {"bf16": True, "gradient_accumulation_steps": 4, "max_grad_norm": 1.0}  # as on the page
    given = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=2, max_steps=2, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-3, weight_decay=0.0,
        lr_scheduler_type="constant", optim="adamw_torch", **written,
    )  # fmt: skip
    theirs = llama()
    InOrder(theirs, given, train_dataset=rows).train()

    ours = task(llama())
    trainer = L.Trainer(precision="half-auto", accumulate_grad_batches=4, gradient_clip_val=1.0, **QUIET)
    trainer.fit(ours, torch.utils.data.DataLoader(rows, batch_size=2))
    assert distance(theirs, ours.net) == 0
    assert distance(theirs, llama()) > 0.1, "the weights moved"


def by_accelerate(batch: torch.Tensor, **recipe: Any) -> nn.Module:
    """Train one step by Accelerate, as on the page: the optimizer is made before ``prepare``."""
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        kwargs_handlers = [AORecipeKwargs(**recipe)]
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=kwargs_handlers)
        model = stack()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        return model
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerates_fp8_and_ours_give_the_same_weights():
    """Accelerate keeps the first and the last Linear, and loses the weights of converted layers by its default."""
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO(keep=["0", "3"]))
    ours = stack()
    ours, optimizer = fabric.setup(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3))
    fabric.backward(ours(batch).square().mean())
    optimizer.step()
    theirs = by_accelerate(batch, enable_fsdp_float8_all_gather=False)
    assert type(theirs[1]).__name__ == "Float8Linear"
    assert distance(theirs, ours.module) < 1e-6 < distance(theirs, stack())

    by_default = by_accelerate(batch)
    assert torch.equal(by_default[1].weight.float(), stack()[1].weight), "docs/migration.md says so"
    assert not torch.equal(ours.module[1].weight, stack()[1].weight)
