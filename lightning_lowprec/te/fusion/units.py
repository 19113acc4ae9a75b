"""Run fused modules of Transformer Engine with Parameters that other modules own.

An engine is a fused module that is built on the meta device and has no weights. At each forward it borrows the live
Parameters (gathered, if FSDP2 shards them) and gives them back. The engine keeps only the scales of its FP8 tensors. It
is no submodule of the model.

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.te.fusion.joined_weight import join_weights, save_parts
from lightning_lowprec.te.linear import outside_inference_mode


def outside_of_graphs(method: Any) -> Any:
    """Run a method of a unit outside of compiled graphs, as Transformer Engine does itself, and of inference mode."""
    disabled: Any = torch.compiler.disable  # untyped in torch
    return disabled(outside_inference_mode(method))


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that all engines of a model share."""

    token_alignment: int = 16
    """The number of which the rows (tokens) of the recipe's GEMMs must be multiples: 32 for MXFP8."""
    expert_alignment: int = 16
    """The same number for the tokens of each expert: 32 for MXFP8, 128 for NVFP4."""
    fp8_eval: bool = True
    """Whether evaluation runs in FP8 too."""

    def precision(self, training: bool) -> AbstractContextManager[None]:
        """Return the context of a forward: the surrounding ``te.autocast``, or none in evaluation if so chosen."""
        if training or self.fp8_eval or not transformer_engine.fp8_is_enabled():
            return nullcontext()
        recipe = transformer_engine.current_recipe()
        context: AbstractContextManager[None] = te.autocast(enabled=False, recipe=recipe)
        return context


class _Engine:
    """Mixed into modules of Transformer Engine, which then have no weights of their own."""

    owner: nn.Module
    """A module whose weights the engine borrows."""

    def drop_parameters(self: Any) -> None:
        """Give every Parameter back."""
        self._parameters.update(dict.fromkeys(self._parameters))

    def compute(self: Any, parameters: Mapping[str, Tensor | None], *args: Any) -> Any:
        """Run the forward with ``parameters`` in the place of the engine's own."""
        self._parameters.update({name: value for name, value in parameters.items() if value is not None})
        try:
            return self.forward(*args, is_first_microbatch=None)
        finally:
            self.drop_parameters()

    def note_sharding(self: Any) -> None:
        """Find out at the first forward whether FSDP2 shards the weights: then no FP8 copy is kept for the backward."""
        if "_is_fsdp2" not in self.__dict__:
            self._is_fsdp2 = transformer_engine.is_sharded_by_fsdp2(self.owner)

    def __getstate__(self: Any) -> dict[str, Any]:
        """Return what deepcopy and pickle keep: the scales, but no quantised weight and no place in global buffers."""
        state = {**self.__dict__, **transformer_engine.copied_attributes(self)}
        state.pop("_is_fsdp2", None)
        return state


class NormLinearEngine(_Engine, te.LayerNormLinear):  # type: ignore[misc]
    """``te.LayerNormLinear`` with borrowed weights."""


class NormMLPEngine(_Engine, te.LayerNormMLP):  # type: ignore[misc]
    """``te.LayerNormMLP`` with borrowed weights."""


class GroupedEngine(_Engine, te.GroupedLinear):  # type: ignore[misc]
    """``te.GroupedLinear`` with borrowed weights."""


def build(cls: type[Any], owner: nn.Module, *args: Any, **options: Any) -> Any:
    """Build an engine without storage, for weights of ``owner``.

    Raises:
        RuntimeError: Transformer Engine found no CUDA.
    """
    engine = cls(*args, device="meta", **options)
    engine.__dict__.update(owner=owner, param_init_meta={})  # no submodule; no closures, which do not pickle
    engine.drop_parameters()
    return engine


def norm_arguments(norm: nn.Module) -> dict[str, Any]:
    """Return the arguments with which Transformer Engine constructs this norm."""
    is_layer_norm = isinstance(norm, nn.LayerNorm)
    eps = getattr(norm, "eps", None) if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else norm.variance_epsilon
    return {"normalization": "LayerNorm" if is_layer_norm else "RMSNorm", "eps": eps}


class NormUnit:
    """Computes a norm, and one GEMM for all linear layers that read its output; or the norm and a whole MLP.

    Args:
        norm: LayerNorm with weight and bias, or a root-mean-square norm with a weight; K features.
        linears: the linear layers that read the norm's output, K -> N each, all with bias or none.
        options: of the model.
        down: the second linear layer of an MLP, N -> K; None for a norm and linear layers.
        activation: Transformer Engine's name of the activation; ``swiglu`` takes (gate, up).
    """

    def __init__(
        self,
        norm: nn.Module,
        linears: Sequence[nn.Linear],
        options: Options,
        down: nn.Linear | None = None,
        activation: str | None = None,
    ) -> None:
        self.linears = tuple(linears)
        self.down = down
        self.options = options
        first = self.linears[0]
        shared = {"bias": first.bias is not None, "params_dtype": first.weight.dtype, **norm_arguments(norm)}
        if down is None:
            out_features = sum(linear.out_features for linear in linears)
            self.engine = build(NormLinearEngine, first, first.in_features, out_features, **shared)
        else:
            sizes = (first.in_features, down.in_features)
            self.engine = build(NormMLPEngine, first, *sizes, activation=activation, **shared)

    @outside_of_graphs
    def linear_outputs(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """[*, K] -> [*, N] for each of the linear layers; dtype of autocast, or x's without."""
        weights = [linear.weight for linear in self.linears]
        joined = join_weights(weights)
        parameters = {"weight": joined, "bias": self._bias(), **_norm_parameters(norm)}
        output = self._run(norm, x, parameters)
        save_parts(output, joined, weights)
        sizes = [linear.out_features for linear in self.linears]
        return torch.split(cut_rows(output, x), sizes, dim=-1)

    @outside_of_graphs
    def mlp_output(self, norm: nn.Module, x: Tensor) -> Tensor:
        """[*, K] -> [*, K]; dtype of autocast, or x's without."""
        if self.down is None:
            raise RuntimeError("This unit has no second linear layer.")
        weights = [linear.weight for linear in self.linears]
        joined = join_weights(weights)
        parameters = {
            "fc1_weight": joined,
            "fc1_bias": self._bias(),
            "fc2_weight": self.down.weight,
            "fc2_bias": self.down.bias,
            **_norm_parameters(norm),
        }
        if torch.is_grad_enabled() and _any_trains(parameters.values()) and not _any_trains((x, norm.weight)):
            # Frozen norms behind a frozen embedding: LayerNormMLP (Transformer Engine 2.20) asks whether the bias of an
            # RMSNorm trains, which there is not, unless the input needs a gradient.
            x = x.detach().requires_grad_()
        output = self._run(norm, x, parameters)
        save_parts(output, joined, weights)
        return cut_rows(output, x)

    def engines(self) -> dict[str, Any]:
        """Return the only engine."""
        return {"": self.engine}

    def _bias(self) -> Tensor | None:
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        return join_weights(biases) if biases else None

    def _run(self, norm: nn.Module, x: Tensor, parameters: Mapping[str, Tensor | None]) -> Tensor:
        """[*, K] -> [M, N], with the padded rows."""
        self.engine.note_sharding()
        # zeros would change the amax: a LayerNorm makes its bias of them
        rows = pad_rows(x, self.options.token_alignment, repeat_last=True)
        trains = torch.is_grad_enabled() and _any_trains((x, *parameters.values()))
        with self.options.precision(norm.training), torch.set_grad_enabled(trains):
            output: Tensor = self.engine.compute(parameters, rows)
        return output


def _norm_parameters(norm: nn.Module) -> dict[str, Tensor | None]:
    bias = getattr(norm, "bias", None)
    return {"layer_norm_weight": norm.weight, "layer_norm_bias": bias}  # type: ignore[dict-item]


def _any_trains(tensors: Iterable[Any]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
