"""A Fabric training loop in FP8: only `precision=` differs from a float32 loop.

python examples/fabric_loop.py                           # FP8; emulated (and slow) on CPU
python examples/fabric_loop.py --precision=bf16-mixed
python examples/fabric_loop.py --resume=fabric_loop.ckpt
"""

import argparse
from itertools import islice

import lightning as L
import torch
import torch.nn.functional as F

import lightning_lowprec  # noqa: F401  # makes "fp8-hybrid" and the other names known to Lightning
from lightning_lowprec.tools.demo import ByteGPT, StdlibText


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="fp8-hybrid")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", default="fabric_loop.ckpt")
    parser.add_argument("--resume", help="a checkpoint to continue from")
    args = parser.parse_args()

    fabric = L.Fabric(precision=args.precision)
    fabric.launch()
    fabric.seed_everything(0)

    model = ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(model, optimizer)

    # the state of the precision (such as an fp16 loss scale) is saved too
    state = {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}
    if args.resume:
        fabric.load(args.resume, state)

    text = StdlibText()
    text.setup("fit")
    batches = fabric.setup_dataloaders(text.train_dataloader())
    for step, (x, y) in enumerate(islice(batches, args.steps)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            fabric.print(f"step {step:4d}  loss {loss.item():.4f}")

    fabric.save(args.checkpoint, state)
    fabric.print(f"final loss {loss.item():.4f}, saved {args.checkpoint}")


if __name__ == "__main__":
    main()
