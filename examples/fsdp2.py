"""Train sharded in FP8: FSDP2 gathers weights as float8. In your Trainer, change only `strategy` and `precision`.

python examples/fsdp2.py                                  # all GPUs of this machine; without a GPU two processes
python examples/fsdp2.py --precision=bf16-mixed           # in bf16: twice the bytes are gathered
python examples/fsdp2.py --strategy=fsdp                  # the name that Lightning users know
torchrun --nproc-per-node=8 examples/fsdp2.py             # see docs/fsdp2.md for more machines
"""

import argparse

import lightning as L
import torch

import lightning_lowprec  # noqa: F401  # makes "fp8-hybrid" and "fsdp2" known to Lightning
from lightning_lowprec.tools.demo import ByteGPT, StdlibText


class Sharded(L.Callback):
    """Print which part of the weights this process holds."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the elements of this process: `to_local()` of a DTensor returns its shard."""
        mine = sum(p.to_local().numel() for p in pl_module.parameters())
        everyone = sum(p.numel() for p in pl_module.parameters())
        print(f"rank {trainer.global_rank} of {trainer.world_size} holds {mine} of {everyone} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-hybrid", help="the format of GEMMs and gathered weights")
    parser.add_argument("--strategy", default="fsdp2")
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    L.seed_everything(0)  # every rank builds the same model and keeps its shard
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        strategy=args.strategy,
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=min(args.steps, 50),
        callbacks=Sharded(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(ByteGPT(), datamodule=StdlibText())
    trainer.print(f"val_loss of rank 0's part {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
