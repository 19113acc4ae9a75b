"""``lowprec plan``: the layers that would run in FP8, why the others would not, and the FLOPs and bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from lightning_lowprec import names as precisions
from lightning_lowprec.conversion.backends import PrecisionName
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools.cli.options import add_fields
from lightning_lowprec.tools.planning import widths
from lightning_lowprec.tools.planning.costs import SEQUENCE_LENGTH, flops, footprints
from lightning_lowprec.tools.planning.render import Report, text
from lightning_lowprec.tools.planning.source import load


def run(argv: list[str]) -> int:
    """Print the plan; return 1 if nothing converts."""
    args = _parser().parse_args(argv)
    if args.precisions:
        return _show_widths(args.json)
    if args.source is None:
        raise ValueError("`source` is missing: give a model, or `--precisions` for the table of bit widths.")
    name = _name(args.precision)
    options = LayerOptions(**{field: getattr(args, field) for field in LayerOptions.__dataclass_fields__})
    source = load(args.source, args.args or {})
    plan = make_plan(source.model, options, recipe=name.gains, alignment=name.alignment)
    report = Report(
        title=source.origin,
        precision=args.precision,
        plan=plan,
        flops=flops(plan, attention_width=source.attention_width, sequence_length=args.sequence_length),
        bytes=footprints(
            source.model,
            plan,
            args.precision,
            fp8_all_gather=name.gathers_fp8,
            bytes_of_codes=name.bytes_of_codes,
        ),
    )
    _show(report, args)
    return 0 if plan.converted else 1


def _show_widths(as_json: bool) -> int:
    rows = [widths.widths(name) for name in widths.all_names()]
    print(json.dumps([asdict(row) for row in rows], indent=1) if as_json else widths.text(rows))
    return 0


def _name(precision: str) -> PrecisionName:
    converting = {name: row for name, row in precisions.TABLE.items() if row.plugin.backend is not None}
    if precision not in converting:
        raise ValueError(f"`precision={precision!r}` converts no layers; expected one of: {', '.join(converting)}.")
    return converting[precision]


def _show(report: Report, args: Namespace) -> None:
    if args.markdown is not None:
        page = text(report, markdown=True, all_rows=args.all)
        Path(args.markdown).write_text(f"{page}\n", encoding="utf-8")
    if args.json:
        data = {
            "source": report.title,
            "precision": report.precision,
            "plan": [asdict(row) for row in report.plan.rows],
            "flops_per_token": {**asdict(report.flops), "fp8_share": report.flops.fp8_share},
            "bytes": [asdict(row) for row in report.bytes],
        }
        print(json.dumps(data, indent=1))
        return
    print(text(report, color=sys.stdout.isatty(), all_rows=args.all))
    if args.markdown is not None:
        print(f"\nwrote {args.markdown}")


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
        action="store_true",
        help="print instead a table of the number formats of every precision: GEMMs, weight, gradient, master, moments,"
        " communication",
    )
    parser.add_argument(
        "--args", type=Mapping[str, Any] | None, help="arguments of the class, or fields of the config, as JSON or YAML"
    )
    parser.add_argument("--precision", type=str, default="fp8-hybrid", help="the name of an FP8 precision")
    add_fields(parser, LayerOptions)
    parser.add_argument(
        "--sequence-length", "--sequence_length", type=int, default=SEQUENCE_LENGTH, help="for attention's FLOPs"
    )
    parser.add_argument("--all", action="store_true", help="print one line per layer, not one per kind of block")
    parser.add_argument("--json", action="store_true", help="print JSON, with a row for every layer")
    parser.add_argument("--markdown", type=str | None, help="also write the plan to this file, as Markdown")
    return parser
