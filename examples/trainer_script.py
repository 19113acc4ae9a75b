"""Train with the Trainer in FP8 by a plugin object, which has more options than a name.

python examples/trainer_script.py
python examples/trainer_script.py --recipe=rowwise --keep=blocks.0
"""

import argparse

import lightning as L

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.tools.demo import ByteGPT, StdlibText


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tensorwise", choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
    parser.add_argument("--keep", nargs="*", default=[], help="linear layers that stay in bf16: names or patterns")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    L.seed_everything(0)
    precision = FP8TorchAO(recipe=args.recipe, keep=args.keep, fp8_eval=False)
    trainer = L.Trainer(
        plugins=precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        val_check_interval=min(args.steps, 50),
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(ByteGPT(), datamodule=StdlibText())

    print(precision.plan)  # every linear layer: FP8, or kept and why
    print(f"val_loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
