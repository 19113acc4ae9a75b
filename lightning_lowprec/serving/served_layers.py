"""Let a live model multiply as a server would: other forwards on the layers, for a while, and nothing else.

Linear, FP8Linear, ...   its forward:    values of codes, rounded activations -> the product in the dtype of autocast
stacked experts          their products: the same

    weight --encode, at the first forward--> codes and scales, kept --decode, at each forward--> values of one layer
    activations --round: scale = max(|group|) / 448; a group is a token, or 128 values of a token--> values

Parameters, optimizers, kept codes, scales and histories of the run are not touched.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_lowprec.callbacks.paused_compiler import may_compile
from lightning_lowprec.checkpoints.weights import rows_of
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
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.numerics.groups import Groups
from lightning_lowprec.numerics.weight_rounding import BLOCK, spread
from lightning_lowprec.precision.plain import unwrapped
from lightning_lowprec.private.deepspeed import refuse_zero
from lightning_lowprec.private.names import replaced
from lightning_lowprec.private.transformers import is_model
from lightning_lowprec.serving.choice import RoundedWeights, of_layers, of_names, weight_name, without_fp8
from lightning_lowprec.serving.content import Content, coded, largest
from lightning_lowprec.serving.export import served_model
from lightning_lowprec.serving.formats import Format
from lightning_lowprec.serving.sources import WithoutAdapter, config_of, is_of_adapter, live_model, model_name

_WHO: Final = "`LowPrecisionEval`"
_SMALLEST: Final = torch.finfo(torch.float32).tiny


@final
class ServedWeight:
    """A weight in the place of the model's ``parameter``: codes, made when they are first used, or values.

    Of a weight that FSDP2 shards, every rank keeps its part of the codes, and gathers the codes at each forward.
    ``shapes``, each [N, K], are those of the matrices of a coded weight: of stacked experts several, else one.
    """

    def __init__(
        self, content: Content, name: str, shapes: Sequence[tuple[int, int]] | None, parameter: Tensor | None
    ) -> None:
        self.is_coded = shapes is not None
        self._content, self._name, self._shapes = content, name, shapes or ()
        self._mesh = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None

    def values(self, like: Tensor) -> Tensor:
        """Return the whole weight, in the dtype and on the device of ``like``: the shape that the model has."""
        if not self.is_coded:
            return self._read().to(like)
        with torch.autocast(like.device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
            bits, scales = self._codes
        codes = bits.full_tensor() if isinstance(bits, DTensor) else bits
        codes = codes.to(like.device).view(torch.float8_e4m3fn)
        values = torch.empty(codes.shape, dtype=like.dtype, device=like.device)
        for target, part, grid in zip(self._matrices(values), self._matrices(codes), scales, strict=True):
            target.copy_(part.float().mul_(spread(grid.to(like.device), part.shape)))
        return values

    def _matrices(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.view(len(self._shapes), *self._shapes[0]).unbind()

    @cached_property
    def _codes(self) -> tuple[Tensor, list[Tensor]]:
        """The codes, [...] uint8, since a DTensor has no operations on e4m3; for each matrix, its reciprocal scales."""
        content, whole = self._content, self._read()
        scale_per, rounding = content.format.scale_per, content.weights.roundings[self._name]
        assert scale_per is not None
        amax = None
        if rounding is not None and rounding.scale_per == "tensor":
            amax = largest(partial(rows_of, whole), tuple(whole.shape))
        codes = torch.empty(whole.shape, dtype=torch.float8_e4m3fn, device=whole.device)
        scales = []
        for target, matrix, shape in zip(self._matrices(codes), self._matrices(whole), self._shapes, strict=True):
            rows = partial(rows_of, matrix)
            parts: dict[str, list[Tensor]] = {"codes": [], "scales": []}
            for kind, part in coded(rows, shape, scale_per, rounding, amax, content.tally, checks=False):
                parts[kind].append(part)
            target.copy_(torch.cat(parts["codes"]))
            scales.append(torch.cat(parts["scales"]))
        bits = codes.view(torch.uint8)
        return bits if self._mesh is None else distribute_tensor(bits, *self._mesh, src_data_rank=None), scales

    def _read(self) -> Tensor:
        """Return the whole weight, values; of a sharded one a collective."""
        with torch.inference_mode(False), torch.no_grad():
            return self._content.source.whole(self._name).contiguous()


def rounded(values: Tensor, format: Format) -> Tensor:
    """Round activations to e4m3 as servers do: [*, K] any float -> the same.

    They have a scale per token where weights have one per row; one per token and 128 values where weights have blocks.
    """
    width, groups = values.shape[-1], values
    if format.scale_per == "block":
        blocks = -(-width // BLOCK)
        groups = F.pad(values, (0, -width % BLOCK)).reshape(*values.shape[:-1], blocks, BLOCK)
    exact = groups.float()
    amax = (exact if format.activation_scales_in_float32 else groups).abs().amax(dim=-1, keepdim=True)
    scale = (amax / E4M3.max).float().clamp(min=_SMALLEST)
    codes = (exact / scale).clamp(-E4M3.max, E4M3.max).to(E4M3.dtype)
    served = codes.float() * scale
    if format.scale_per == "block":
        served = served.flatten(-2)[..., :width]
    return served.to(values.dtype)


@final
class ServedLayers:
    """The layers of one model in the precision of a server; codes are made at the first forward and kept here.

    ``options`` choose layers if none of the model runs in low precision.
    """

    def __init__(self, model: nn.Module, format: Format, *, weights_only: bool, options: LayerOptions | None) -> None:
        self._model = model
        refuse_zero(model, _WHO)
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise RuntimeError(f"{_WHO} does not know the weights that FSDP has flattened. Use `strategy='fsdp2'`.")
        inner = unwrapped(model)
        inner = served_model(inner) if any(map(is_model, inner.modules())) else inner
        self.content = Content(
            source=WithoutAdapter(live_model(inner), config_of(inner), merge=False),
            model=inner,
            weights=_choose(inner, options),
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
        self._linears: list[tuple[nn.Module, ServedWeight]] = []
        self._experts: dict[nn.Module, dict[str, ServedWeight]] = {}
        """Stacks, and their weights by the name of the Parameter."""
        for matmul, module in matmuls(inner):
            name = weight_name(model_name(matmul.fqn), matmul.kind)
            if is_of_adapter(name) or (name not in parts and backends.owner(module) is None):
                continue  # runs as in the evaluation of the run
            parameter = name.rpartition(".")[2]
            weight = ServedWeight(self.content, name, parts.get(name), module._parameters.get(parameter))
            if matmul.kind == STACKED:
                self._experts.setdefault(module, {})[parameter] = weight
            elif is_linear(module):
                self._linears.append((module, weight))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Multiply as a server within this context; the model is as before after it, also after an exception."""
        with ExitStack() as undo:
            if may_compile(self._model):
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            for layer, weight in self._linears:
                activations = self._activations if weight.is_coded else None
                undo.enter_context(replaced(layer, "forward", partial(_multiply, layer, weight, activations)))
            for experts, weights in self._experts.items():
                if not isinstance(experts, RoutedExperts):  # the abstract methods of the role follow
                    take_experts(experts, RoutedExperts, {})  # type: ignore[type-abstract]
                    undo.callback(release_experts, experts)  # type: ignore[arg-type]  # has another class by now
                multiply = partial(_multiply_experts, experts, weights, self._activations)
                undo.enter_context(replaced(experts, "multiply", multiply))
                undo.enter_context(replaced(experts, "takes", lambda hidden_states: True))
            yield


def _choose(model: nn.Module, options: LayerOptions | None) -> RoundedWeights:
    weights = of_layers(model)
    if not weights.roundings and not any(backends.owner(module) for _, module in matmuls(model)):
        return without_fp8(model, options)
    if options is not None:
        raise ValueError(f"{_WHO}: the precision of the run has chosen the layers. Leave `keep` and `only` out.")
    return weights if weights.roundings else of_names(model)


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
    weights: Mapping[str, ServedWeight],
    activations: Format | None,
    rows: Tensor,
    name: str,
    groups: Groups,
) -> Tensor:
    """Multiply the rows of each expert by its matrix: [P, K] -> [P, N]."""
    _check(experts, rows)
    if name in weights:
        values = weights[name].values(rows)
        rows = rounded(rows, activations) if weights[name].is_coded and activations is not None else rows
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
