"""``lowprec plan``: the layers that would run in FP8, why the others would not, and the FLOPs and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lightning_lowprec.conversion.options import LayerOptions, take
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.planning.costs import SEQUENCE_LENGTH, flops, footprints, forward_share
from lightning_lowprec.tools.planning.model_plan import converting_name, recipes_of
from lightning_lowprec.tools.planning.pages import all_names, plan_page, widths, widths_page
from lightning_lowprec.tools.planning.per_rank import per_rank
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.tools.terminal import prints_to_stderr, working


def run(argv: Sequence[str]) -> int:
    """Print the plan; return 1 if nothing converts."""
    args = _parser().parse_args(argv)
    if args.fits is not None:
        from lightning_lowprec.tools.planning import fits_command

        return fits_command.run(args)
    if args.precisions is not None:
        rows = [widths(name) for name in all_names()]
        print(strict_json.dumps(rows) if args.json else widths_page(rows))
        return 0
    if args.source is None:
        raise ValueError("`source` is missing: give a model, or `--precisions` for the table of bit widths.")
    for option, value, default in (("fp8_reduce", args.fp8_reduce, False), ("copies", args.copies, 1)):
        if args.shards is None and value != default:
            raise ValueError(f"`{option}={value}` is not valid without `--shards`: say how many ranks share one copy.")
    name = converting_name(args.precision)
    with working("building the model and planning its layers"), prints_to_stderr(wanted=args.json):
        source = load(args.source, args.args or {})
        recipes = recipes_of(dict(map(_pattern, args.recipe or ())), args.precision, name)
        plan = make_plan(source.model, take(LayerOptions, vars(args)), name.plan_request(recipes))
        share, forward = forward_share(source.model, plan)
    per_token = flops(plan, attention_width=source.attention_width, sequence_length=args.sequence_length)
    sizes, ranks = footprints(source.model, plan, args.precision), []
    if args.shards is not None:
        ranks = per_rank(source.model, plan, sizes, shards=args.shards, copies=args.copies, fp8_reduce=args.fp8_reduce)
    write = partial(plan_page, source.origin, plan, per_token, sizes, ranks, forward=forward, all_rows=args.all)
    if args.markdown is not None:
        Path(args.markdown).write_text(f"{write(markdown=True)}\n", encoding="utf-8")
    data = {
        "source": source.origin,
        "precision": args.precision,
        "plan": [asdict(row) for row in plan.all_rows],
        "forward_share": share,
        "flops_per_token": {**asdict(per_token), "fp8_share": per_token.fp8_share},
        "bytes": [asdict(row) for row in sizes],
        "per_rank": [asdict(rank) for rank in ranks],
    }
    print(strict_json.dumps(data) if args.json else write())
    return 0 if plan.converted else 1


def _pattern(entry: str) -> tuple[str, Any]:
    pattern, equals, value = entry.rpartition("=")
    if not equals:
        raise ValueError(f"`recipe={entry!r}` is not valid; expected PATTERN=RECIPE, e.g. '*.o_proj=rowwise'.")
    if not value.startswith("{"):
        return pattern, value
    try:
        return pattern, json.loads(value)
    except json.JSONDecodeError as error:
        expected = '\'*={"forward": "bf16"}\''
        raise ValueError(
            f"`recipe={entry!r}` is no JSON ({error}); expected PATTERN=RECIPE, e.g. {expected}."
        ) from None


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="lowprec plan",
        description="Print which layers of a model would run in FP8, why the others would not, and what the plan means"
        " in FLOPs and bytes. The model is built without weights; nothing is downloaded.",
    )
    parser.add_argument(
        "source",
        type=str | None,
        nargs="?",
        help="a class path (my.Model, file.py:Model), a transformers config.json or the folder it lies in, a model type"
        " of transformers (llama), or a checkpoint (.ckpt, .pt, .safetensors)",
    )
    parser.add_argument(
        "--precisions",
        type=str | None,
        nargs="?",
        const="",
        help="print instead a table of the number formats of every precision: GEMMs, weight, gradient, master, moments,"
        " communication; with --fits: the names to simulate, such as bf16-sr,fp8-tensorwise",
    )
    parser.add_argument(
        "--args", type=Mapping[str, Any] | None, help="arguments of the class, or fields of the config, as JSON or YAML"
    )
    parser.add_argument("--precision", type=str, default="fp8-hybrid", help="the name of an FP8 precision")
    parser.add_argument("--sequence_length", type=int, default=SEQUENCE_LENGTH, help="for attention's FLOPs")
    parser.add_argument(
        "--shards",
        type=int | None,
        help="print what one rank of `strategy='fsdp2'` holds and sends, with so many ranks per copy of the model",
    )
    parser.add_argument("--copies", type=int, default=1, help="copies of the model (`replicate`), with --shards")
    parser.add_argument(
        "--fp8_reduce", action="store_true", help="gradients are sent as float8 codes (`fp8_reduce`), with --shards"
    )
    _add_fits(parser)
    parser.add_argument("--all", action="store_true", help="print one line per layer, not one per kind of block")
    parser.add_argument("--json", action="store_true", help="print JSON, with a row for every layer")
    parser.add_argument("--markdown", type=str | None, help="also write the plan to this file, as Markdown")
    words: dict[str, Any] = {"nargs": "+", "type": str, "metavar": "NAME"}
    parser.add_argument("--keep", default=(), help="Linears that stay in high precision, by name or pattern", **words)
    parser.add_argument("--only", help="if given, only these Linears convert", **words)
    parser.add_argument(
        "--recipe",
        nargs="+",
        type=str,
        metavar="PATTERN=RECIPE",
        help="recipes per layer; the first pattern that matches wins: 'blocks.0.*=bf16' '*.o_proj=rowwise'"
        " '*=tensorwise'; a value may say which GEMMs run in bf16: '*={\"forward\": \"bf16\"}'",
    )
    parser.add_argument("--first_last_layers_bf16", action="store_true", help="keep the first and the last blocks")
    parser.add_class_arguments(LayerOptions, as_group=False, skip={"keep", "only", "first_last_layers_bf16"})
    return parser


def _add_fits(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--fits",
        type=str | None,
        help="print instead which precisions train the model within the memory of a GPU, such as 141GB, 80GiB, H200 or"
        ' "RTX 4090": training steps with AdamW are simulated, without a GPU',
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences, images or rows per GPU and step, with --fits")
    parser.add_argument("--seq", type=int | None, help="tokens per sequence, with --fits")
    parser.add_argument(
        "--checkpointing", action="store_true", help="compute blocks again in the backward, with --fits"
    )
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True), with --fits")
    parser.add_argument("--devices", type=int, default=1, help="GPUs of --strategy, with --fits")
    parser.add_argument("--strategy", type=str | None, help="fsdp2: the model is sharded over --devices, with --fits")
    parser.add_argument("--data", type=str | None, help="a LightningDataModule whose batches are read, with --fits")
    parser.add_argument("--data_args", type=Mapping[str, Any] | None, help="arguments of --data, as JSON or YAML")
