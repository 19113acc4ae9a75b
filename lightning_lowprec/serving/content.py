"""The content of a served model: every tensor with its name, shape and dtype, and then its values, in that order.

The values are read, rounded and handed on some rows at a time. Only tensors that are published in another form than
the model's, such as stacked experts, are whole in memory for a moment. A weight is rounded by the arithmetic that the
run trained with:

    trained with      format with a scale per row     format with a scale per 128 x 128
    one scale         the same codes: every row or block has the weight's scale
    scale per row     the same codes                  other codes
    scale per block   other codes                     the same codes

Other codes have the run's arithmetic with the format's amax.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from lightning_lowprec.checkpoints.weights import Source, rows_of
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.matmuls import STACKED, matmuls
from lightning_lowprec.conversion.plan import Plan
from lightning_lowprec.numerics import weight_rounding
from lightning_lowprec.private.transformers import Group, as_published, published_groups
from lightning_lowprec.serving.formats import Format
from lightning_lowprec.serving.safetensors_files import Stored
from lightning_lowprec.serving.sources import is_of_adapter, model_name

WITHOUT_FP8: Final = "fp8-rowwise"
"""The precision whose plan says which layers become codes, where the run had no FP8."""


@dataclass(frozen=True, kw_only=True)
class RoundedWeights:
    """The weights that ran in FP8."""

    roundings: Mapping[str, weight_rounding.WeightRounding | None]
    """By name of the tensor; None: the forward's scales have no place in any format, or there was no such forward."""
    kept: Mapping[str, str] = field(default_factory=dict)


NOTHING: Final = RoundedWeights(roundings={})


def of_layers(model: nn.Module) -> RoundedWeights:
    """Choose the weights of a live model that its converted layers multiply, or multiplied, in FP8."""
    roundings: dict[str, weight_rounding.WeightRounding | None] = {}
    kept: dict[str, str] = {}
    for matmul, module in matmuls(model):
        fqn = model_name(matmul.fqn)
        if is_of_adapter(fqn):
            continue
        name = weight_name(fqn, matmul.kind)
        parameter = name.rpartition(".")[2]
        of_layer = backends.weight_roundings(module)
        if of_layer is None:
            kept[fqn] = "not converted"
        elif parameter in of_layer:
            roundings[name] = of_layer[parameter]
        else:
            kept[fqn] = "the forward of its layer has no codes of a scale per weight, row or block"
    return RoundedWeights(roundings=roundings, kept=kept)


def of_plan(plan: Plan, rounding: weight_rounding.WeightRounding | None) -> RoundedWeights:
    """Choose the weights that a plan converts; they are rounded one way."""
    rows = [(model_name(row.fqn), row) for row in plan.rows]
    roundings = {weight_name(fqn, row.kind): rounding for fqn, row in rows if row.kept_because is None}
    return RoundedWeights(
        roundings=roundings, kept={fqn: row.kept_because for fqn, row in rows if row.kept_because is not None}
    )


def weight_name(fqn: str, kind: str) -> str:
    """Return the name of a layer's weight; stacked experts are listed by their Parameters."""
    return fqn if kind == STACKED else f"{fqn}.weight".lstrip(".")


Rows = Callable[[int, int], Tensor]
"""Returns ``weight[start:stop]``."""
_ELEMENTS: Final = 1 << 23  # rounded at a time: 32 MB of float32
_IN_BY_OUT = "it is a Conv1D, and no server reads codes of weights that are stored as [in, out]"
_STACKED = "its model publishes the experts as one tensor, of which no server of this format reads codes"
_TIED = "another layer has the same weight"


@dataclass
class Tally:
    """What happened to the weights that became codes."""

    same: int = 0
    """Weights whose codes are those of the last step."""
    other: int = 0
    """Weights with other codes, because the format needs other scales."""
    new: int = 0
    """Weights that no forward rounded before."""


@dataclass(frozen=True)
class Target:
    """One tensor of the published model."""

    name: str
    shape: tuple[int, ...]
    is_coded: bool


@dataclass
class Content:
    """Everything that a folder or a server gets."""

    source: Source
    """The tensors by the model's names."""
    model: nn.Module
    """The model, on the meta device too; it says how its tensors are published."""
    weights: RoundedWeights
    format: Format
    dtype: torch.dtype
    """Of floating-point tensors without codes."""
    checks: bool = False
    """Whether NaN and inf raise; the device is waited for."""
    tally: Tally = field(default_factory=Tally)
    kept: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shapes = self.source.shapes
        self._modules = {model_name(fqn): module for fqn, module in self.model.named_modules()}
        self.kept.update(self.weights.kept)
        groups = published_groups(self.model, self._shapes)
        self._groups = [(group, self._targets(group)) for group in groups]

    # ---- which tensors

    def _targets(self, group: Group) -> list[Target]:
        on_meta = {name: torch.empty(self._shapes[name].size, device="meta") for name in group.names}
        published = as_published(self.model, on_meta)
        is_coded = self.format.scale_per is not None and all(name in self.weights.roundings for name in group.names)
        if is_coded and (reason := self._kept_because(group, published)) is not None:
            self.kept.update({_layer(name): reason for name in group.names})
            is_coded = False
        return [Target(name, tuple(tensor.shape), is_coded) for name, tensor in published.items()]

    def _kept_because(self, group: Group, published: Mapping[str, Tensor]) -> str | None:
        module = self._modules.get(_layer(group.names[0])) if group.is_renamed else None
        if module is not None and not isinstance(module, nn.Linear):
            return _IN_BY_OUT
        if any(tensor.dim() != 2 or not name.endswith(".weight") for name, tensor in published.items()):
            return _STACKED
        weight = None if module is None else module._parameters.get("weight")
        tied = [fqn for fqn, m in self._modules.items() if weight is not None and m._parameters.get("weight") is weight]
        if len(tied) > 1:
            self.kept.update(dict.fromkeys(tied, _TIED))
            return _TIED
        return next(filter(None, (self.format.kept_because(tuple(t.shape)) for t in published.values())), None)

    @property
    def coded(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that become codes, by published name."""
        return {target.name: target.shape for _, targets in self._groups for target in targets if target.is_coded}

    @property
    def ignored(self) -> list[str]:
        """The linear layers in high precision, by the names of the model and of the published checkpoint."""
        names = list(self.kept)
        for group, targets in self._groups:
            if any(_layer(name) in self.kept for name in group.names):
                names += [_layer(target.name) for target in targets]
        return list(dict.fromkeys(names))

    def stored(self) -> list[Stored]:
        """Return all tensors, in the order of :meth:`chunks`."""
        return [stored for group, targets in self._groups for target in targets for stored in self._of(group, target)]

    def _of(self, group: Group, target: Target) -> list[Stored]:
        if not target.is_coded:
            return [Stored(target.name, target.shape, self._dtype(group))]
        scales = Stored(target.name + self.format.scales, self.format.scale_shape(target.shape), torch.float32)
        return [Stored(target.name, target.shape, torch.float8_e4m3fn), scales]

    def _dtype(self, group: Group) -> torch.dtype:
        dtype = self._shapes[group.names[0]].dtype
        return self.dtype if dtype.is_floating_point else dtype

    # ---- their values

    def chunks(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a name, and the next elements of the tensor of this name, without the caller's autocast."""
        chunks = self._all_chunks()
        while True:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def _all_chunks(self) -> Iterator[tuple[str, Tensor]]:
        for group, targets in self._groups:
            if group.is_renamed:
                yield from self._chunks(group, targets[0], self._rows(group.names[0]))
                continue
            whole = {name: self._rows(name)(0, max(1, *self._shapes[name].size[:1])) for name in group.names}
            amax = self._amax(group)
            published = as_published(self.model, whole)
            del whole
            for target in targets:
                tensor = published.pop(target.name)
                yield from self._chunks(group, target, partial(rows_of, tensor), amax)

    def _chunks(
        self, group: Group, target: Target, rows: Rows, amax: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if target.is_coded:
            try:
                yield from self._coded(group, target, rows, amax)
            except ValueError as error:
                raise ValueError(f"{target.name!r} cannot be rounded to FP8: {error}.") from error
            return
        dtype, shape = self._dtype(group), target.shape or (1,)
        for start, stop in spans(shape):
            yield target.name, rows(start, stop).to(dtype)

    def _coded(self, group: Group, target: Target, rows: Rows, amax: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """Yield codes and reciprocal scales of a weight, [N, K], some rows at a time, and fill the tally.

        ``amax``, [1, 1], is that of the whole weight, if the forward rounded with one scale.
        """
        scale_per, rounding = self.format.scale_per, self.weights.roundings[group.names[0]]
        assert scale_per is not None
        if amax is None and rounding is not None and rounding.scale_per == "tensor":
            amax = largest(rows, target.shape)
        for start, stop in spans(target.shape):
            values = rows(start, stop)
            largest_values = weight_rounding.amax_grid(values, scale_per)
            if self.checks and not largest_values.isfinite().all():
                raise ValueError("it holds NaN or inf")
            if rounding is None:
                grid = weight_rounding.nearest_scale(largest_values)
            elif amax is not None:
                grid = rounding.scale_of(amax).expand(largest_values.shape)
            else:
                grid = rounding.scale_of(largest_values)
            yield target.name, weight_rounding.codes(values, grid)
            yield target.name + self.format.scales, grid.reciprocal()
        same = rounding is not None and rounding.scale_per in ("tensor", scale_per)
        self.tally.same += same
        self.tally.new += rounding is None
        self.tally.other += rounding is not None and not same

    def _amax(self, group: Group) -> Tensor | None:
        """Return the largest absolute value of a weight that has one scale and becomes several: [1, 1]."""
        name = group.names[0]
        rounding = self.weights.roundings.get(name)
        if len(group.names) > 1 or rounding is None or rounding.scale_per != "tensor":
            return None
        return largest(self._rows(name), tuple(self._shapes[name].size))

    def _rows(self, name: str) -> Rows:
        """Return a function that reads rows of a weight; of a plain model's weight in FP8, as the run rounded them."""
        rows = partial(self.source.rows, name)
        rounding = self.weights.roundings.get(name)
        as_trained = None if rounding is None else rounding.as_trained
        return rows if as_trained is None else lambda start, stop: as_trained(rows(start, stop))


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


# ---- the rounding of one weight


def spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield first row and end of the rows of a tensor that are handled at a time: multiples of a block's rows."""
    width = max(1, math.prod(shape[1:]))
    step = max(weight_rounding.BLOCK, _ELEMENTS // width // weight_rounding.BLOCK * weight_rounding.BLOCK)
    for start in range(0, max(shape[0], 1), step):  # an empty tensor is a part too
        yield start, min(start + step, shape[0])


def largest(rows: Rows, shape: tuple[int, ...]) -> Tensor:
    """Return the largest absolute value of a tensor of any dimensions: [1, 1] float32."""
    parts = [rows(start, stop).abs().amax() for start, stop in spans(shape)]
    return torch.stack(parts).amax().float().reshape(1, 1)
