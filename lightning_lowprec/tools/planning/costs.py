"""The FLOPs of a plan, by formula and in a forward, and the bytes of a model with AdamW, by the formats of a name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_lowprec import names
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.matmuls import CONV1D, STACKED
from lightning_lowprec.conversion.name_formats import LIGHTNINGS, Formats
from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.conversion.recipe_map import ALL_GEMMS, NO_GEMM, InBF16

SEQUENCE_LENGTH = 4096
COMPARED = (
    "32-true", "bf16-true", "bf16-lean-sr", "bf16-lean", "bf16-8bit", "bf16-sr", "bf16-remainder", "bf16-master",
    "bf16-mixed",
)  # fmt: skip
"""Names that convert no layers, beside which a plan is shown."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Matrix FLOPs of one training step, per token: forward 2, backward 4 per weight that trains."""

    fp8: float
    high_precision: float
    """In linear layers that are kept, recurrent layers and ``nn.MultiheadAttention.in_proj``."""
    attention: float
    """The scores and their sum over values, causal; 0 if the model's attention is not known."""

    @property
    def fp8_share(self) -> float:
        """The share of all matrix FLOPs that runs in FP8."""
        total = self.fp8 + self.high_precision + self.attention
        return self.fp8 / total if total else 0.0


def flops(plan: Plan, *, attention_width: int = 0, sequence_length: int = SEQUENCE_LENGTH) -> Flops:
    """Return the FLOPs of a plan; ``attention_width`` is heads x head_dim x layers."""
    total = sum(_of(row) for row in plan.all_rows)
    in_bf16 = {fqn: recipe.in_bf16 for fqn, recipe in plan.recipes.items()}
    fp8 = sum(_of(row, in_bf16.get(row.fqn, NO_GEMM)) for row in plan.rows if row.kept_because is None)
    # scores and values: 2 products of 2 FLOPs, half the positions, three times with backward
    attention = 6.0 * sequence_length * attention_width
    return Flops(fp8=fp8, high_precision=total - fp8, attention=attention)


def _of(row: PlanRow, without: InBF16 = NO_GEMM) -> float:
    gemms = len(ALL_GEMMS - without - (NO_GEMM if row.trains else {"grad_weight"}))
    return 2.0 * gemms * row.per_token * row.in_features * row.out_features


def forward_share(model: nn.Module, plan: Plan) -> tuple[float | None, str]:
    """Return the share of the FLOPs of a forward of ``example_input_array`` that is low, and a line about the share.

    Nothing is computed: the model is on the meta device. None: not known; the line is empty without an example.
    """
    example = getattr(model, "example_input_array", None)
    if example is None:
        return None, ""
    from lightning_lowprec.precision.layer_calls import LayerCalls, WatchedForward
    from lightning_lowprec.private.fake_gpu import tensors_of
    from lightning_lowprec.tools.planning.simulated_step import inputs_of

    inputs, parameter = inputs_of(model), next(model.parameters())
    batch = inputs.batch(tensors_of(example)[0].shape[0], None, parameter.device)
    rows = [row for row in plan.rows if row.kept_because is None]
    fqns = {row.fqn.rpartition(".")[0] if row.kind == STACKED else row.fqn for row in rows}
    layers = {id(model.get_submodule(fqn)) for fqn in fqns}
    calls = LayerCalls([model], lambda module: id(module) in layers)
    of = "a forward of `example_input_array`"
    try:
        with WatchedForward(calls):
            inputs.loss(model, batch)
    except (NotImplementedError, RuntimeError) as error:  # the forward reads values
        return None, f"matrix FLOPs of {of}: not known ({str(error).splitlines()[0]})"
    return calls.share, calls.share_in_words(of, plan.format) or f"matrix FLOPs of {of}: not known"


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a model under one precision with AdamW, before any sharding."""

    precision: str
    weights: int
    gradients: int
    optimizer: int
    """AdamW's two moments, and masters where the precision has some."""
    gathered: int
    """All weights once, in the dtype in which ``strategy="fsdp2"`` gathers them; 0 where it does not run."""

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer together."""
        return self.weights + self.gradients + self.optimizer


def footprints(model: nn.Module, plan: Plan, precision: str) -> list[Bytes]:
    """Return the bytes under precisions that convert no layers, and under ``precision`` with this plan."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = [_bytes(name, _formats(name), total, trained) for name in COMPARED]
    mixed, formats = rows[-1], _formats(precision)
    coded = gathered_rows(plan, precision)
    gathered = mixed.gathered - sum(row.elements for row in coded)
    if not formats.keeps_codes:
        return [*rows, replace(_bytes(precision, formats, total, trained), gathered=gathered)]
    converted = [row for row in plan.rows if row.kept_because is None]
    inside = sum(row.elements for row in converted), sum(row.elements for row in converted if row.trains)
    of_codes, others = _bytes("", formats, *inside), _bytes("", _formats(mixed.precision), *inside)
    last = Bytes(
        precision=precision,
        weights=mixed.weights - others.weights + of_codes.weights,
        gradients=mixed.gradients - others.gradients + of_codes.gradients,
        optimizer=mixed.optimizer - others.optimizer + of_codes.optimizer,
        gathered=gathered if names.TABLE[precision].gathers_fp8 else 0,
    )
    return [*rows, last]


def formats_of(precision: str) -> Formats | None:
    """Return the number formats of a name, Lightning's or registered; None if nobody has said them."""
    row = names.TABLE.get(precision)
    return LIGHTNINGS.get(precision) if row is None else row.formats


def _formats(precision: str) -> Formats:
    return formats_of(precision) or LIGHTNINGS["bf16-mixed"]


def _bytes(precision: str, formats: Formats, total: int, trained: int) -> Bytes:
    weight, gradient, kept, sent = formats.bytes_per_parameter
    return Bytes(
        precision=precision,
        weights=weight * total,
        gradients=gradient * trained,
        optimizer=kept * trained,
        gathered=sent * total,
    )


def gathered_rows(plan: Plan, precision: str) -> list[PlanRow]:
    """Return the rows whose weights FSDP2 gathers as float8: by the name, or with recipes per layer by the recipe."""
    name = names.TABLE.get(precision)
    if name is None or name.backend is None:
        return []
    recipes = backends.get(name.backend).recipes

    def as_codes(row: PlanRow) -> bool:
        if row.kept_because is not None or (row.kind == CONV1D and name.conv1d != "gathered"):
            return False
        if not plan.recipes:
            return name.gathers_fp8
        recipe = plan.recipes[row.fqn]
        return recipes[recipe.name or ""] and recipe.in_bf16 <= {"grad_weight"}

    return [row for row in plan.rows if as_codes(row)]
