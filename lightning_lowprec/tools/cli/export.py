"""``lowprec export``: plain weights from a checkpoint of any precision."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_lowprec.tools.export import DtypeName, export


def run(argv: list[str]) -> int:
    """Write the file and print how much it holds."""
    args = _parser().parse_args(argv)
    checkpoint = Path(args.checkpoint)
    if not checkpoint.is_file():
        raise ValueError(
            f"`checkpoint={args.checkpoint!r}` is not a file; expected a checkpoint (not a sharded folder)."
        )
    weights = export(checkpoint, Path(args.out), dtype=args.dtype, key=args.key, strip_prefix=args.strip_prefix)
    size = sum(value.numel() * value.element_size() for value in weights.values())
    print(f"wrote {len(weights)} tensors, {size / 1e6:.1f} MB, to {args.out}")
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lowprec export", description="Write only the weights of a checkpoint to a plain file."
    )
    parser.add_argument("checkpoint", type=str, help="a file of the Trainer, fabric.save, torch.save or safetensors")
    parser.add_argument("out", type=str, help="the new file; safetensors if it ends in .safetensors, else torch")
    parser.add_argument("--dtype", type=DtypeName, default="keep", help="dtype of floating-point weights")
    parser.add_argument(
        "--key", type=str | None, help="key of the weights in the checkpoint; found without it in most checkpoints"
    )
    parser.add_argument(
        "--strip_prefix",
        "--strip-prefix",
        type=str,
        default="",
        help="prefix that is removed from every name, e.g. model.",
    )
    return parser
