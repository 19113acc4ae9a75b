"""The content of a served model: every tensor with its name, shape and dtype, and then its values, in that order.

The values are read, rounded and handed on some rows at a time. Only tensors that are published in another form than
the model's, such as stacked experts, are whole in memory for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from lightning_lowprec.checkpoints.weights import Source
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.private import transformers_names
from lightning_lowprec.private.transformers_names import Group
from lightning_lowprec.serving.adapters import model_name
from lightning_lowprec.serving.choice import Choice
from lightning_lowprec.serving.coding import Rows, Tally, coded, largest, step_of
from lightning_lowprec.serving.formats.base import Choices, Format, Header
from lightning_lowprec.serving.safetensors_file import Stored

_IN_BY_OUT = "it is a Conv1D, and no server reads codes of weights that are stored as [in, out]"
_STACKED = "its model publishes the experts as one tensor, of which no server of this format reads codes"
_TIED = "tied to an embedding"


@final
@dataclass(frozen=True)
class Target:
    """One tensor of the published model."""

    name: str
    shape: tuple[int, ...]
    is_coded: bool


@final
@dataclass
class Content:
    """Everything that a folder or a server gets.

    Args:
        source: the tensors by the model's names.
        model: the model, on the meta device too; it says how its tensors are published.
        choice: the weights that ran in FP8.
        format: the format.
        dtype: of floating-point tensors without codes; None: as they are.
        weights_only: whether the server reads weights only in FP8.
        checks: whether NaN and inf raise, and other codes than the run's are compared; for both, the device is waited
            for.
    """

    source: Source
    model: nn.Module
    choice: Choice
    format: Format
    dtype: torch.dtype | None
    weights_only: bool = False
    checks: bool = False
    tally: Tally = field(default_factory=Tally)
    kept: dict[str, str] = field(default_factory=dict)
    """The linear layers in high precision, and the reasons."""

    def __post_init__(self) -> None:
        """Find out what becomes of every tensor."""
        self._shapes = self.source.shapes()
        self._modules = {model_name(fqn): module for fqn, module in self.model.named_modules()}
        self.kept.update(self.choice.kept)
        groups = transformers_names.groups(self.model, self._shapes)
        self._groups = [(group, self._targets(group)) for group in groups]

    # ---- which tensors

    def _targets(self, group: Group) -> list[Target]:
        given = {name: torch.empty(self._shapes[name].size, device="meta") for name in group.names}
        found = transformers_names.published(self.model, given)
        rounded = all(name in self.choice.roundings for name in group.names)
        if rounded and self.format.scale_per is not None:
            reason = self._refusal(group, found)
            if reason is None:
                return [Target(name, tuple(tensor.shape), True) for name, tensor in found.items()]
            self.kept.update({_layer(name): reason for name in group.names})
        return [Target(name, tuple(tensor.shape), False) for name, tensor in found.items()]

    def _refusal(self, group: Group, found: Mapping[str, Tensor]) -> str | None:
        module = self._modules.get(_layer(group.names[0])) if group.is_renamed else None
        if module is not None and not isinstance(module, nn.Linear):
            return _IN_BY_OUT
        if not group.is_renamed and not self.format.takes_experts:
            return f"transformers stacks the experts, and reads no codes of {self.format.name} for them"
        if any(tensor.dim() != 2 or not name.endswith(".weight") for name, tensor in found.items()):
            return _STACKED
        if module is not None and _is_tied(self.model, module):
            return _TIED
        return next(filter(None, (self.format.refusal(tuple(tensor.shape)) for tensor in found.values())), None)

    @property
    def coded(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights that become codes, by published name."""
        return {target.name: target.shape for _, targets in self._groups for target in targets if target.is_coded}

    @property
    def coded_parts(self) -> dict[str, list[tuple[int, int]]]:
        """By name in the model: the shapes, each [N, K], of the matrices that a weight becomes, all of them codes.

        Raises:
            ValueError: several weights of the model become one.
        """
        found: dict[str, list[tuple[int, int]]] = {}
        for group, targets in self._groups:
            if not targets[0].is_coded:
                continue
            if len(group.names) > 1:
                raise ValueError(f"{', '.join(group.names)} are published as one tensor, which is not supported here.")
            found[group.names[0]] = [(target.shape[0], target.shape[1]) for target in targets]
        return found

    @property
    def ignored(self) -> list[str]:
        """The linear layers in high precision, by the names of the model and of the published checkpoint."""
        names = list(self.kept)
        for group, targets in self._groups:
            if any(_layer(name) in self.kept for name in group.names):
                names += [_layer(target.name) for target in targets]
        return list(dict.fromkeys(names))

    def quantization_config(self) -> dict[str, object] | None:
        """Return ``quantization_config`` of the config, or None."""
        return self.format.config(Choices(kept=self.ignored, weights_only=self.weights_only))

    def metadata(self) -> dict[str, str]:
        """Return what the headers of the files say."""
        plain = [target.name for _, targets in self._groups for target in targets if not target.is_coded]
        dtype = self.dtype or torch.bfloat16
        header = Header(coded=self.coded, plain=plain, dtype=dtype, weights_only=self.weights_only)
        return self.format.metadata(header)

    def stored(self) -> list[Stored]:
        """Return all tensors, in the order of :meth:`chunks`."""
        return [stored for group, targets in self._groups for target in targets for stored in self._of(group, target)]

    def _of(self, group: Group, target: Target) -> list[Stored]:
        if not target.is_coded:
            return [Stored(target.name, target.shape, self._dtype(group))]
        codes, scales = self.format.names(target.name)
        return [
            Stored(codes, target.shape, torch.float8_e4m3fn),
            Stored(scales, self.format.scale_shape(target.shape), torch.float32),
        ]

    def _dtype(self, group: Group) -> torch.dtype:
        own = self._shapes[group.names[0]].dtype
        return self.dtype if self.dtype is not None and own.is_floating_point else own

    # ---- their values

    def chunks(self) -> Iterator[tuple[str, Tensor]]:
        """Yield a name, and the next elements of the tensor of this name; several tensors may grow at once.

        The caller's autocast does not reach the arithmetic.
        """
        made = self._made()
        while True:
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                chunk = next(made, None)
            if chunk is None:
                return
            yield chunk

    def _made(self) -> Iterator[tuple[str, Tensor]]:
        for group, targets in self._groups:
            if group.is_renamed:
                name = group.names[0]
                yield from self._chunks(group, targets[0], self._rows(name))
                continue
            whole = {name: self._rows(name)(0, max(1, *self._shapes[name].size[:1])) for name in group.names}
            amax = self._amax(group)
            found = transformers_names.published(self.model, whole)
            del whole
            for target in targets:
                tensor = found.pop(target.name)
                yield from self._chunks(group, target, partial(_rows, tensor), amax)

    def _chunks(
        self, group: Group, target: Target, rows: Rows, amax: Tensor | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if target.is_coded:
            try:
                yield from self._coded(group, target, rows, amax)
            except ValueError as error:
                raise ValueError(f"{target.name!r} cannot be rounded to FP8: {error}.") from error
            return
        dtype = self._dtype(group)
        count = target.shape[0] if target.shape else 1
        step = step_of(target.shape or (1,))
        for start in range(0, count, step):
            yield target.name, rows(start, min(start + step, count)).to(dtype)

    def _coded(self, group: Group, target: Target, rows: Rows, amax: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        assert self.format.scale_per is not None
        shape = (target.shape[0], target.shape[1])
        rounding = self._rounding(group)
        if amax is None and rounding is not None and rounding.scale_per == "tensor":
            amax = largest(rows, shape)
        codes, scales = self.format.names(target.name)
        names = {"codes": codes, "scales": scales}
        scale_per, tally = self.format.scale_per, self.tally
        for kind, part in coded(rows, shape, scale_per, rounding, amax, tally, checks=self.checks):
            yield names[kind], part

    def _rounding(self, group: Group) -> WeightRounding | None:
        return self.choice.roundings[group.names[0]]

    def _amax(self, group: Group) -> Tensor | None:
        """Return the largest absolute value of a weight that has one scale and becomes several: [1, 1]."""
        name = group.names[0]
        rounding = self.choice.roundings.get(name)
        if len(group.names) > 1 or rounding is None or rounding.scale_per != "tensor":
            return None
        return largest(self._rows(name), tuple(self._shapes[name].size))

    def _rows(self, name: str) -> Rows:
        """Return a function that reads rows of a weight; of a plain model's weight in FP8, as the run rounded them."""
        rows = partial(self.source.rows, name)
        rounding = self.choice.roundings.get(name)
        seen = None if rounding is None else rounding.as_trained
        return rows if seen is None else lambda start, stop: seen(rows(start, stop))


def _rows(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop] if tensor.dim() else tensor.reshape(1)


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _is_tied(model: nn.Module, module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return any(
        other is not module and other._parameters.get("weight") is weight
        for other in model.modules()
        if weight is not None
    )
