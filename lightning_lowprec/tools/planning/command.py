"""``lowprec plan``: the layers that would run in FP8, why the others would not, and the FLOPs and bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.tools import strict_json
from lightning_lowprec.tools.planning.costs import flops, footprints, forward_share
from lightning_lowprec.tools.planning.model_plan import converting_name, recipes_of
from lightning_lowprec.tools.planning.pages import all_names, plan_page, widths, widths_page
from lightning_lowprec.tools.planning.per_rank import per_rank
from lightning_lowprec.tools.planning.source import load
from lightning_lowprec.tools.terminal import prints_to_stderr, working


def run(args: Any) -> int:
    """Print the plan; return 1 if nothing converts."""
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
        plan = make_plan(source.model, args.layers, name.plan_request(recipes))
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
