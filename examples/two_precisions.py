"""Train the first steps in bf16, and go on in FP8: two runs with one checkpoint between them.

python examples/two_precisions.py
"""

import argparse

import lightning as L

from lightning_lowprec.tools.demo import ByteGPT, StdlibText


def train(precision: str, max_steps: int, ckpt_path: str | None = None) -> L.Trainer:
    """Train until ``max_steps`` steps were made, those of the checkpoint included."""
    L.seed_everything(0)
    trainer = L.Trainer(precision=precision, max_steps=max_steps, logger=False, enable_checkpointing=False)
    trainer.fit(ByteGPT(), StdlibText(), ckpt_path=ckpt_path)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="of each of the two runs")
    steps = parser.parse_args().steps
    train("bf16-mixed", steps).save_checkpoint("two_precisions.ckpt")
    trainer = train("fp8-hybrid", 2 * steps, "two_precisions.ckpt")
    print(f"{trainer.global_step} steps, {steps} of them in FP8: loss {trainer.callback_metrics['train_loss']:.4f}")
