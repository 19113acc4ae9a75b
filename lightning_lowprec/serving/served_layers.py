"""Let a live model multiply as a server would: other forwards on the layers, for a while, and nothing else.

Linear, FP8Linear, ...   its forward:    values of codes, rounded activations -> the product in the dtype of autocast
stacked experts          their products: the same

Parameters, optimizers, kept codes, scales and histories of the run are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, NoReturn, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_lowprec.callbacks.paused_compiler import may_compile
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.experts import (
    RoutedExperts,
    compute_dtype,
    grouped_product,
    is_transposed,
    release_experts,
    take_experts,
)
from lightning_lowprec.conversion.matmuls import STACKED, is_conv1d, is_linear, matmuls
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.numerics.groups import Groups
from lightning_lowprec.precision.plain import unwrapped
from lightning_lowprec.private.deepspeed import refuse_zero
from lightning_lowprec.private.transformers import is_model
from lightning_lowprec.serving.activations import rounded
from lightning_lowprec.serving.adapters import WithoutAdapter, config_of, is_of_adapter, model_name
from lightning_lowprec.serving.choice import Choice, of_layers, of_names, of_plan
from lightning_lowprec.serving.content import Content
from lightning_lowprec.serving.export import served_model
from lightning_lowprec.serving.first_rounding import plan_without_fp8
from lightning_lowprec.serving.formats.base import Format
from lightning_lowprec.serving.served_weight import CodedWeight, KeptWeight, ServedWeight
from lightning_lowprec.serving.source import LiveModel

_WHO: Final = "`LowPrecisionEval`"


@final
class ServedLayers:
    """The layers of one model in the precision of a server; codes are made at the first forward and kept here.

    Args:
        model: as it trains; wrapped by Fabric, DDP or ``torch.compile`` too.
        format: with codes.
        weights_only: whether activations stay in high precision.
        options: which layers become codes, if no layer of the model runs in low precision; None: the rules alone.

    Raises:
        ValueError: no weight would become codes, or ``options`` are given for a model whose run has chosen the layers.
        RuntimeError: ZeRO-3 has cut the weights, or the model is sharded by FSDP of the first generation.
    """

    def __init__(self, model: nn.Module, format: Format, *, weights_only: bool, options: LayerOptions | None) -> None:
        self._model = model
        _refuse(model)
        inner = unwrapped(model)
        inner = served_model(inner) if any(map(is_model, inner.modules())) else inner
        self.content = Content(
            source=WithoutAdapter(LiveModel(inner), config_of(inner), merge=False),
            model=inner,
            choice=_choice(inner, options),
            format=format,
            dtype=None,
            weights_only=weights_only,
        )
        self._activations = None if weights_only else format
        parts = self.content.coded_parts
        if not parts:
            reasons = "; ".join(sorted(set(self.content.kept.values()))) or "the model has no linear layer"
            raise ValueError(f"{_WHO}: `format={format.name!r}` would have no weight in FP8: {reasons}.")
        self.coded = tuple(parts)
        """The names of the weights that are codes."""
        self._linears: list[tuple[nn.Module, ServedWeight, bool]] = []
        """Layers, their weights, and whether these are codes."""
        self._experts: dict[nn.Module, dict[str, tuple[ServedWeight, bool]]] = {}
        """Stacks, and the same by the name of the Parameter."""
        for matmul, module in matmuls(inner):
            self._add(model_name(matmul.fqn), matmul.kind, module, parts)

    def _add(self, fqn: str, kind: str, module: nn.Module, parts: Mapping[str, list[tuple[int, int]]]) -> None:
        name = fqn if kind == STACKED else f"{fqn}.weight".lstrip(".")
        shapes = parts.get(name)
        if is_of_adapter(fqn) or (shapes is None and backends.owner(module) is None):
            return  # runs as in the evaluation of the run
        parameter = name.rpartition(".")[2]
        if shapes is not None:
            held = module._parameters.get(parameter)
            weight: ServedWeight = CodedWeight(self.content, name, shapes, held)
        else:
            weight = KeptWeight(self.content, name)
        if kind == STACKED:
            self._experts.setdefault(module, {})[parameter] = (weight, shapes is not None)
        elif is_linear(module):
            self._linears.append((module, weight, shapes is not None))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Multiply as a server within this context; the model is as before after it, also after an exception."""
        with ExitStack() as undo:
            if may_compile(self._model):
                # the stance is set by the call, and the context ends it
                undo.callback(torch.compiler.set_stance("force_eager").__exit__, None, None, None)
            for layer, weight, is_coded in self._linears:
                activations = self._activations if is_coded else None
                _replace(undo, layer, "forward", partial(_multiply, layer, weight, activations))
            for experts, weights in self._experts.items():
                self._swap_experts(undo, experts, weights)
            yield

    def _swap_experts(
        self, undo: ExitStack, experts: nn.Module, weights: Mapping[str, tuple[ServedWeight, bool]]
    ) -> None:
        if not isinstance(experts, RoutedExperts):
            take_experts(experts, _ServedExperts, {})
            undo.callback(release_experts, experts)  # type: ignore[arg-type]  # the line before has changed its class
        multiply = partial(_multiply_experts, experts, weights, self._activations)
        _replace(undo, experts, "multiply", multiply)
        _replace(undo, experts, "takes", _always)


@final
class _ServedExperts(RoutedExperts):
    """Stacked experts, of which :class:`ServedLayers` replaces the methods."""

    def takes(self, hidden_states: Tensor) -> NoReturn:
        """Not called."""
        raise AssertionError

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> NoReturn:
        """Not called."""
        raise AssertionError


def _always(hidden_states: Tensor) -> bool:
    return True


def _choice(model: nn.Module, options: LayerOptions | None) -> Choice:
    found = of_layers(model)
    converted = found.roundings or any(backends.owner(module) for _, module in matmuls(model))
    if not converted:
        planned = of_plan(plan_without_fp8(model, options), None)
        kept = {model_name(fqn): reason for fqn, reason in planned.kept.items()}
        return Choice(roundings=dict.fromkeys(map(model_name, planned.roundings)), kept=kept)
    if options is not None:
        raise ValueError(f"{_WHO}: the precision of the run has chosen the layers. Leave `keep` and `only` out.")
    return found if found.roundings else of_names(model)


def _refuse(model: nn.Module) -> None:
    """Raise for models whose layers do not compute by themselves, or have no weights of their own."""
    refuse_zero(model, _WHO)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise RuntimeError(f"{_WHO} does not know the weights that FSDP has flattened. Use `strategy='fsdp2'`.")


_MISSING: Final = object()


def _replace(undo: ExitStack, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Give one module another method until ``undo`` ends."""
    before = vars(module).get(name, _MISSING)
    vars(module)[name] = function

    def restore() -> None:
        if before is _MISSING:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = before

    undo.callback(restore)


def _multiply(layer: nn.Module, weight: ServedWeight, activations: Format | None, input: Tensor) -> Tensor:
    """Do the work of a Linear: [*, K] -> [*, N] in the dtype of autocast, or in that of the input without autocast."""
    _check(layer, input)
    rows = input.to(compute_dtype(input))
    bias: Any = layer.bias
    values = weight.values(rows)
    rows = rows if activations is None else rounded(rows, activations)
    values = values.t() if is_conv1d(layer) else values
    return F.linear(rows, values, None if bias is None else bias.to(rows.dtype))


def _multiply_experts(
    experts: Any,
    weights: Mapping[str, tuple[ServedWeight, bool]],
    activations: Format | None,
    rows: Tensor,
    name: str,
    groups: Groups,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: [P, K] -> [P, N]."""
    _check(experts, rows)
    if name in weights:
        weight, is_coded = weights[name]
        values = weight.values(rows)
        rows = rounded(rows, activations) if is_coded and activations is not None else rows
    else:
        values = experts.weight(name)
    return grouped_product(rows, values if is_transposed(experts) else values.mT, groups)


def _check(layer: nn.Module, input: Tensor) -> None:
    if torch.is_grad_enabled() and input.requires_grad:
        raise RuntimeError(
            f"{_WHO}: {type(layer).__name__} got an input that needs a gradient, and a server computes none. Evaluate"
            " under `torch.no_grad()`, and train outside of the evaluation."
        )
    if any(isinstance(p, DTensor) for p in (input, *layer._parameters.values())):
        raise RuntimeError(
            f"{_WHO} cannot compute {type(layer).__name__}, whose weight tensor parallelism cuts. Evaluate without"
            " tensor parallelism: `FSDP2Strategy(tensor_parallel_size=1)`, or export the model and `--check` it."
        )
