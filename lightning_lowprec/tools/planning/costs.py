"""What a plan costs: FLOPs, the bytes of a model with AdamW, and what a rank of ``strategy="fsdp2"`` holds and sends.

docs/fsdp2.md has the formulas of the collectives, which are rings. A dimension that the shards do not divide is
padded, which is counted. Not counted: buffers, copies (HSDP), tensor parallelism, gradient accumulation.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from torch import Tensor, nn

from lightning_lowprec import names
from lightning_lowprec.checks import check_integer
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.matmuls import CONV1D, STACKED
from lightning_lowprec.conversion.name_formats import LIGHTNINGS, Formats
from lightning_lowprec.conversion.plan import Plan, PlanRow
from lightning_lowprec.conversion.recipe_map import ALL_GEMMS, NO_GEMM, InBF16
from lightning_lowprec.fsdp2.options import blocks as blocks_of
from lightning_lowprec.masters.kept_float32 import kept_float32

SEQUENCE_LENGTH = 4096
COMPARED = (
    "32-true", "bf16-true", "bf16-8bit", "bf16-sr", "bf16-remainder", "bf16-master", "bf16-mixed",
)  # fmt: skip
"""Names that convert no layers, beside which a plan is shown."""
_FLOAT32: Final = 4
_SCALES_OF_CODES: Final = 3  # of the weight and of two moments


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
    host: int = 0
    """In host memory: float32 values of weights that do not train, and that the precision makes smaller."""

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
        row = _bytes(precision, formats, total, trained)
        row = replace(row, weights=row.weights - _saved_by_codes(plan, precision, formats))
        own = row if precision in COMPARED else replace(row, gathered=gathered, host=_kept_on_host(model, formats))
        return [*rows, own]
    converted = [row for row in plan.rows if row.kept_because is None]
    inside = sum(row.elements for row in converted), sum(row.elements for row in converted if row.trains)
    of_codes, others = _bytes("", formats, *inside), _bytes("", _formats(mixed.precision), *inside)
    last = Bytes(
        precision=precision,
        weights=mixed.weights - others.weights + of_codes.weights,
        gradients=mixed.gradients - others.gradients + of_codes.gradients,
        optimizer=mixed.optimizer - others.optimizer + of_codes.optimizer,
        gathered=gathered if names.TABLE[precision].gathers_fp8 else 0,
        host=4 * (inside[0] - inside[1]),
    )
    return [*rows, last]


def _kept_on_host(model: nn.Module, formats: Formats) -> int:
    """Return the bytes of float32 weights that do not train and that become half precision."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(formats.weight)
    stay = {} if dtype is None else kept_float32(model, dtype)
    frozen = [p for fqn, p in model.named_parameters() if not p.requires_grad and fqn not in stay]
    return 0 if dtype is None else sum(p.nbytes for p in frozen if p.dtype is torch.float32)


def _formats(precision: str) -> Formats:
    """Return the number formats of a name, Lightning's or registered; those of bf16-mixed if nobody has said them."""
    row = names.TABLE.get(precision)
    return (LIGHTNINGS.get(precision) if row is None else row.formats) or LIGHTNINGS["bf16-mixed"]


def _bytes(precision: str, formats: Formats, total: int, trained: int) -> Bytes:
    weight, gradient, kept, sent = formats.bytes_per_parameter
    return Bytes(
        precision=precision,
        weights=int(weight * total),
        gradients=int(gradient * trained),
        optimizer=int(kept * trained),
        gathered=int(sent * total),
    )


def _saved_by_codes(plan: Plan, precision: str, formats: Formats) -> int:
    """Return the bytes that the frozen weights need less which are stored as codes with their scales."""
    stored = [row for row in plan.rows if row.stored_as_codes]
    weights = (torch.empty(row.out_features, row.in_features, device="meta") for row in stored)
    scales = sum(scales_of(weight, names.TABLE[precision].tile) for weight in weights)
    return int((formats.bytes_per_parameter[0] - 1) * sum(row.elements for row in stored)) - _FLOAT32 * scales


def gathered_rows(plan: Plan, precision: str) -> list[PlanRow]:
    """Return the rows whose weights FSDP2 gathers as codes: by the name, or with recipes per layer by the recipe."""
    name = names.TABLE.get(precision)
    if name is None or name.backend is None:
        return []
    recipes = backends.get(name.backend).recipes
    kinds = {kind for recipe in plan.recipes.values() if recipes[kind := recipe.name or ""]}

    def as_codes(row: PlanRow) -> bool:
        if row.kept_because is not None:
            return False
        if len(kinds) > 1:  # FSDP2 gathers values then, and only stored codes as they are
            return row.stored_as_codes
        if not plan.recipes:
            return name.gathers_fp8
        recipe = plan.recipes[row.fqn]
        return recipes[recipe.name or ""] and recipe.in_bf16 <= {"grad_weight"}

    return [row for row in plan.rows if as_codes(row)]


# ---- one rank of FSDP2


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of parameters that are gathered."""

    fp8: int = 0
    """As codes, one byte each."""
    scales: int = 0
    """Scales of the parameters in ``fp8``: one per tensor, or one per tile."""
    other: int = 0
    frozen: int = 0
    """Among ``fp8`` and ``other``: do not train, so they have no gradients."""

    @property
    def total(self) -> int:
        """All parameters."""
        return self.fp8 + self.other

    @property
    def trained(self) -> int:
        """Those that have gradients."""
        return self.total - self.frozen

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Bytes that one rank sends in one training step."""

    all_gather_forward: float
    all_gather_backward: float
    reduce_scatter: float
    scales: float


def weights_of(
    model: nn.Module, fp8: Collection[str], *, blocks: Collection[str], shards: int, tile: int
) -> dict[str, Weights]:
    """Return what each of the groups gathers, by fqn, with the padding of ``shards`` parts; the root is ``""``.

    ``fp8`` has the layers, and Parameters of stacked experts, that are gathered as codes, with a scale per ``tile``
    rows and columns, or 0: one; ``blocks`` the modules that gather their own weights.
    """
    groups = dict.fromkeys(["", *blocks], Weights())
    coded = {*fp8, *(f"{fqn}.weight" for fqn in fp8)}
    for fqn, p in model.named_parameters():
        group = next((block for block in blocks if fqn.startswith(f"{block}.")), "")
        size, is_coded = padded(p, shards), fqn in coded
        groups[group] += Weights(
            fp8=size if is_coded else 0,
            scales=scales_of(p, tile) if is_coded else 0,
            other=0 if is_coded else size,
            frozen=0 if p.requires_grad else size,
        )
    return groups


def scales_of(weight: Tensor, tile: int) -> int:
    """Return the number of scales of a weight, (rows, columns): one per ``tile`` rows and columns, or 0: one."""
    return -(-weight.shape[0] // tile) * -(-weight.shape[1] // tile) if tile else 1


def padded(tensor: Tensor, shards: int) -> int:
    """Return the elements of ``shards`` equal parts of the first dimension that hold ``tensor``, (rows, ...)."""
    rows = tensor.shape[0] if tensor.ndim else 1
    return -(-rows // shards) * shards * (tensor.numel() // max(rows, 1))


def gathered(weights: Weights, param_dtype: torch.dtype) -> int:
    """Return the bytes of whole weights as FSDP2 gathers them: codes take 1 byte each."""
    return weights.fp8 + weights.other * param_dtype.itemsize


def all_gather(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring all-gather or reduce-scatter of ``size`` bytes in all."""
    return size * (ranks - 1) / ranks


def all_reduce(size: float, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring all-reduce of ``size`` bytes on each rank."""
    return 2 * size * (ranks - 1) / ranks


def step(blocks: Weights, root: Weights, *, shards: int, param_dtype: torch.dtype) -> Volume:
    """Return the volume of one step of one micro-batch, of the weights below the root and of the root.

    The weights of the root stay gathered for the backward, and gradients are reduced in float32.
    """
    forward = gathered(blocks, param_dtype) + gathered(root, param_dtype)
    gradients = (blocks.trained + root.trained) * _FLOAT32
    scales = _FLOAT32 * (blocks.scales + root.scales)
    return Volume(
        all_gather_forward=all_gather(forward, shards),
        all_gather_backward=all_gather(gathered(blocks, param_dtype), shards),
        reduce_scatter=all_gather(gradients, shards),
        scales=all_reduce(scales, shards),
    )


def in_flight(block: Weights, root: Weights, *, param_dtype: torch.dtype) -> int:
    """Return an upper bound of the bytes beside state and activations that a rank holds at once in a backward pass.

    The root's weights stay gathered, and its gradients wait for the last one. Meanwhile a block's gradients and their
    buffer exist, and the next block is gathered; ``block`` is the largest. At the end the root's weights are freed.
    """
    gradient = param_dtype.itemsize + _FLOAT32
    during = gathered(root, param_dtype) + root.trained * param_dtype.itemsize
    during += gathered(block, param_dtype) + block.trained * gradient
    return max(during, root.trained * gradient)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Bytes of one rank under one precision, with AdamW."""

    precision: str
    state: float
    """Weights, gradients, masters and moments of this rank, and the codes that the rank keeps of its shards."""
    in_flight: int
    """An upper bound of gathered weights and of gradients on their way, at once; no activations."""
    sent: Volume


def per_rank(model: nn.Module, plan: Plan, sizes: Sequence[Bytes], *, shards: int) -> list[Rank]:
    """Return the bytes of a rank for every precision of ``sizes`` that runs under FSDP2; the plan is of the last one.

    Uneven shards of codes raise ValueError.
    """
    check_integer("shards", shards, least=1)
    elements = sum(p.numel() for p in model.parameters())
    ranks = []
    for row in sizes:
        if not row.gathered:  # does not run under FSDP2
            continue
        name = names.TABLE.get(row.precision)
        param_dtype = torch.float32 if row.gathered == _FLOAT32 * elements else torch.bfloat16
        fp8 = _coded(gathered_rows(plan, row.precision), shards)
        blocks = blocks_of(model)
        tile = 0 if name is None else name.tile
        groups = weights_of(model, fp8, blocks=blocks, shards=shards, tile=tile)
        root, below = groups.pop(""), list(groups.values())
        together = sum(below, Weights())
        keeps = together.fp8 + root.fp8  # codes of shards in high precision, from gather to gather
        keeps -= sum(r.elements for r in plan.rows if r.stored_as_codes and r.fqn in fp8)  # these are no copies
        if name is not None and name.keeps_codes:  # the step reduces the scales of codes and moments
            together = replace(together, scales=_SCALES_OF_CODES * together.scales)
            keeps = 0
        largest = max(below, key=lambda weights: weights.total, default=Weights())
        ranks.append(
            Rank(
                precision=row.precision,
                state=(_state(row, plan) * (together.total + root.total) / elements + keeps) / shards,
                in_flight=in_flight(largest, root, param_dtype=param_dtype),
                sent=step(together, root, shards=shards, param_dtype=param_dtype),
            )
        )
    return ranks


def _coded(rows: Sequence[PlanRow], shards: int) -> list[str]:
    for row in rows:
        if row.parts % shards:
            kinds = {STACKED: "experts", CONV1D: "input features"}
            parts = f"{row.parts} {kinds.get(row.kind, 'output features')}"
            raise ValueError(
                f"`shards={shards}` is not possible: {row.fqn!r} has {parts}, which do not"
                " divide into equal shards, and uneven shards cannot be gathered as codes. Keep the layer in high"
                " precision (`--keep`), or take a divisor (`--shards`)."
            )
    return [row.fqn for row in rows]


def _state(row: Bytes, plan: Plan) -> int:
    """Return the bytes of a model's state; FSDP2 keeps gradients of weights that are codes in float32."""
    name = names.TABLE.get(row.precision)
    wider = _FLOAT32 - 1 if name is not None and name.keeps_codes else 0
    return row.state + wider * sum(r.elements for r in plan.rows if r.kept_because is None and r.trains)
