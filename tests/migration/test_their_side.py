"""The Trainer of transformers trains beside ours, as the page of migration writes both, on the same data."""

from typing import Any

import lightning as L
import pytest
import torch
import transformers

from tests.serving.models import llama
from tests.toys import ON_CPU, Task

QUIET = {**ON_CPU, "max_steps": 2}


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

    ours = Task(llama(), lambda net, batch: net(**batch).loss)
    ours.optimizer = lambda task: torch.optim.AdamW(task.parameters(), lr=1e-3, weight_decay=0.0)
    trainer = L.Trainer(precision="half-auto", accumulate_grad_batches=4, gradient_clip_val=1.0, **QUIET)
    trainer.fit(ours, torch.utils.data.DataLoader(rows, batch_size=2))
    assert all(map(torch.equal, theirs.parameters(), ours.net.parameters()))
    assert not torch.equal(theirs.lm_head.weight, llama().lm_head.weight), "the weights moved"
