"""``lowprec plan``, from a shell and from Python: the layers that run in FP8, why others do not, FLOPs and bytes."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from torch import nn

from lightning_lowprec import names as precisions
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import PrecisionName
from lightning_lowprec.conversion.matmuls import SOURCE
from lightning_lowprec.conversion.options import LayerOptions, called_with, take
from lightning_lowprec.conversion.plan import Plan, grouped, make_plan, verdict_with_gain
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.messages import in_units
from lightning_lowprec.names import validate_name
from lightning_lowprec.tools.output import Table, dumps, page, prints_to_stderr, working
from lightning_lowprec.tools.planning.costs import Bytes, Flops, Rank, flops, footprints, per_rank
from lightning_lowprec.tools.planning.source import load

GATHER_NOTE = (
    "all-gather: all weights once, as strategy='fsdp2' gathers them (a scale per tensor or tile: one byte per converted"
    " weight). Under Lightning's own FSDP2 strategy, bf16-mixed gathers 4 bytes. docs/fsdp2.md has"
    " the bytes of a step."
)
HOST_NOTE = "Weights that do not train keep their float32 values in host memory"
RANK_NOTE = (
    "state: weights, gradients, masters and moments of one rank, and the codes that it keeps of its shards until"
    " the next step. in flight: at most so much more, for gathered weights and gradients on their way; activations come"
    " on top. The last two columns: what a rank sends in one step of one micro-batch, in rings."
)


def run(args: Namespace) -> int:
    """Print the plan; return 1 if nothing converts."""
    if args.fits is not None:
        from lightning_lowprec.tools.fits import report

        return report.run(args)
    if args.precisions is not None:
        raise ValueError("`precisions` goes with `--fits`. For a plan name one precision by `--precision`.")
    name = converting_name(args.precision)
    with working("building the model and planning its layers"), prints_to_stderr(wanted=args.json):
        source = load(args.source, args.args or {})
        recipes = recipes_of(dict(map(_pattern, args.recipe or ())), args.precision, name)
        plan = make_plan(source.model, args.layers, name.plan_request(recipes))
    per_token = flops(plan, attention_width=source.attention_width, sequence_length=args.sequence_length)
    sizes, ranks = footprints(source.model, plan, args.precision), []
    if args.shards is not None:
        ranks = per_rank(source.model, plan, sizes, shards=args.shards)
    data = {
        "source": source.origin,
        "precision": args.precision,
        "plan": [asdict(row) for row in plan.all_rows],
        "flops_per_token": {**asdict(per_token), "fp8_share": per_token.fp8_share},
        "bytes": [asdict(row) for row in sizes],
        "per_rank": [asdict(rank) for rank in ranks],
    }
    print(dumps(data) if args.json else plan_page(source.origin, plan, per_token, sizes, ranks, all_rows=args.all))
    return 0 if plan.converted else 1


def _pattern(entry: str) -> tuple[str, object]:
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


# ---- what it prints


def plan_page(
    origin: str,
    plan: Plan,
    flops: Flops,
    sizes: Sequence[Bytes],
    ranks: Sequence[Rank] = (),
    *,
    all_rows: bool = False,
) -> str:
    """Return the report on the plan of a model; ``all_rows``: one row per layer, not one per kind of block."""
    rows = [(row.fqn, row) for row in plan.all_rows] if all_rows else grouped(plan.all_rows)
    layers = [(name or "(the model)", row.shape, verdict_with_gain(row, plan.format)) for name, row in rows]
    bytes_rows = [
        (row.precision, *map(in_units, (row.weights, row.gradients, row.optimizer, row.state)), _sent(row.gathered))
        for row in sizes
    ]
    parts: list[Table | Sequence[str]] = [
        [f"{origin}: {plan.summary()}"],
        Table([("layer", "in -> out", "verdict"), *layers], words=(0, 2)),
        _flops_lines(plan, flops),
        Table([("with AdamW", "weights", "gradients", "moments + masters", "together", "all-gather"), *bytes_rows]),
        [GATHER_NOTE],
    ]
    if host := sizes[-1].host:
        parts.append([f"{HOST_NOTE}: {in_units(host)} under {sizes[-1].precision}."])
    if ranks:
        lines = [["one rank", "state", "in flight", "all-gather", "reduce-scatter"]]
        for rank in ranks:
            gathers = rank.sent.all_gather_forward + rank.sent.all_gather_backward
            columns = (rank.state, rank.in_flight, gathers, rank.sent.reduce_scatter)
            lines.append([rank.precision, *map(_sent, columns)])
        parts += [Table(lines), [RANK_NOTE]]
    return page(parts)


def _flops_lines(plan: Plan, flops: Flops) -> list[str]:
    convolutions = sum(not row.per_token for row in plan.others)
    counted, missing, of = [f"{flops.high_precision:.3g} kept"], list[str](), ""
    if flops.attention:
        counted.append(f"{flops.attention:.3g} attention")
    else:
        missing, of = ["attention", "products of bare parameters"], " of the linear layers"
    if convolutions:
        missing, of = [f"{convolutions} convolutions", *missing], " of the linear layers"
    if missing:
        counted.append(f"{', '.join(missing)} not known and not counted")
    lines = [
        f"matrix FLOPs per token{of}: {flops.fp8_share:.1%} in {plan.format}"
        f" ({flops.fp8:.3g} {plan.format}, {', '.join(counted)})",
    ]
    if plan.format != "FP8":
        return [*lines, f"gains per layer: not known for {plan.format}"]
    slow = len(plan.below_break_even())
    if slow:
        every = slow == len(plan.converted)
        way = "`bf16-mixed` is expected to be faster" if every else "`--keep` keeps layers in bf16"
        lines.append(f"{slow} of {len(plan.converted)} converted layers are expected to be slower than in bf16; {way}")
    lines.append(f"gains per layer: {SOURCE}, nearest shape; coarse")
    return lines


def _sent(value: float) -> str:
    return in_units(value) if value else "-"


# ---- from Python


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LayerOptions):
    """The arguments of :func:`plan`."""

    model: nn.Module | str = field(kw_only=False)
    precision: str = field(default="fp8-hybrid", kw_only=False)
    recipe: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module | str):
            raise TypeError(
                f"`model={self.model!r}` is not valid; expected a Module, or a string as for `lowprec plan`, such as"
                " 'llama'."
            )
        super().__post_init__()


@called_with(PlanOptions)
def plan(options: PlanOptions) -> Plan:
    """Return which layers of a model run in low precision, and why the others do not. Nothing is changed or trained.

    A notebook shows one line per kind of block; ``print(plan)`` has one line per layer.

    Args:
        model: a model, also on the meta device; or what ``lowprec plan`` takes: a class path (``"my.Model"``), a config
            or a model type of transformers (``"llama"``), of which no weights are made or downloaded.
        precision: the name of a precision that converts layers.
        recipe: recipes per layer, by pattern; the first pattern that matches wins: ``{"*.o_proj": "rowwise", "*":
            "tensorwise"}``.
        options: the choices of layers that plugins take too: ``keep``, ``only`` and the others.

    Raises:
        ValueError: the precision is not known or converts no layers, or a pattern matches no layer.
        TypeError: the model or an option is of a wrong type.
    """
    model = options.model
    name = converting_name(options.precision)
    request = name.plan_request(recipes_of(options.recipe, options.precision, name))
    model = load(model, {}).model if isinstance(model, str) else model
    return make_plan(model, take(LayerOptions, options), request)


def converting_name(precision: str) -> PrecisionName:
    """Return the row of a precision that converts layers; for any other raise ValueError."""
    validate_name(precision)
    converting = {name: row for name, row in precisions.TABLE.items() if row.backend is not None}
    if precision not in converting:
        raise ValueError(f"`precision={precision!r}` converts no layers; expected one of: {', '.join(converting)}.")
    return converting[precision]


def recipes_of(patterns: Mapping[str, object] | None, precision: str, name: PrecisionName) -> str | RecipeMap:
    """Return the recipes per layer that the user gives, or the recipe of the precision."""
    if not patterns:
        return name.plan.recipe
    recipes = backends.get(name.backend).recipes
    if not recipes:
        raise ValueError(f"`precision={precision!r}` has no recipes per layer; leave `recipe` (`--recipe`) out.")
    choices = name.layer_recipes or tuple(recipes)
    return RecipeMap.of(patterns, names=choices, base=choices[0])
