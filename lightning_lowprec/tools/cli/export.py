"""``lowprec export``: plain weights from a checkpoint of any precision."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser

from lightning_lowprec.tools.export import DtypeName, export


def run(argv: list[str]) -> int:
    """Write the file and say what is in it."""
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
        prog="lowprec export", description="Write the weights of a checkpoint, and nothing else, to a plain file."
    )
    parser.add_argument("checkpoint", type=str, help="a file of the Trainer, fabric.save, torch.save or safetensors")
    parser.add_argument("out", type=str, help="the new file; safetensors if it ends in .safetensors, else torch")
    parser.add_argument("--dtype", type=DtypeName, default="keep", help="of floating-point weights")
    parser.add_argument("--key", type=str | None, help="where the weights are in the checkpoint (default: found)")
    parser.add_argument(
        "--strip_prefix", "--strip-prefix", type=str, default="", help="removed from names, e.g. model."
    )
    return parser
