"""Run fused modules of Transformer Engine with Parameters that other modules own.

An engine is a fused module that is built on the meta device and has no weights. At each forward it borrows the live
Parameters (gathered, if FSDP2 shards them) and gives them back. The engine keeps only the scales of its FP8 tensors. It
is no submodule of the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from lightning_lowprec.numerics.padding import cut_rows, pad_rows
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.private.torch import is_exporting, is_in_backward
from lightning_lowprec.products.transforms import KEEP, check_call, without_second_gradient
from lightning_lowprec.te.fusion.candidates import NormCandidate, activation_name
from lightning_lowprec.te.fusion.joined_weight import are_beside, join_weights, place_apart, place_beside, save_parts
from lightning_lowprec.te.layer import recomputation


def outside_of_graphs(method: Callable[..., Any]) -> Any:
    """Run a method of a unit outside of compiled graphs, as Transformer Engine does itself, and of inference mode.

    The first forward makes buffers that training writes to; tensors of inference mode cannot be written to.
    """

    @functools.wraps(method)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return method(*args, **kwargs)
        try:
            return method(*args, **kwargs)
        except RuntimeError:  # a kernel got a tensor without memory
            if is_exporting():
                check_call("a fused layer of Transformer Engine", KEEP)
            raise

    disabled: Any = torch.compiler.disable  # untyped in torch
    return disabled(outside)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that all engines of a model share; see :func:`~lightning_lowprec.te.fusion.fuse`."""

    token_alignment: int
    expert_alignment: int
    fp8_eval: bool

    def precision(self, engine: Any, training: bool) -> AbstractContextManager[None]:
        """Return the context of a forward: the surrounding ``te.autocast``, or none in evaluation if so chosen.

        A checkpoint that runs the forward of ``engine`` again in a backward pass gets the context of the first run.

        Raises:
            RuntimeError: such a checkpoint, with delayed scaling.
        """
        manager = transformer_engine.manager()
        enabled, wanted = manager.is_fp8_enabled(), training or self.fp8_eval
        if wanted and engine.fp8 and not enabled and is_in_backward():
            return recomputation(engine)
        if wanted or not enabled:
            return nullcontext()
        context: AbstractContextManager[None] = te.autocast(enabled=False, recipe=manager.get_fp8_recipe())
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
            return without_second_gradient(self.forward(*args, is_first_microbatch=None))
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


@final
class NormLinearEngine(_Engine, te.LayerNormLinear):  # type: ignore[misc]
    """``te.LayerNormLinear`` with borrowed weights."""


@final
class NormMLPEngine(_Engine, te.LayerNormMLP):  # type: ignore[misc]
    """``te.LayerNormMLP`` with borrowed weights."""


@final
class GroupedEngine(_Engine, te.GroupedLinear):  # type: ignore[misc]
    """``te.GroupedLinear`` with borrowed weights."""


def build(cls: type[Any], owner: nn.Module, *args: Any, **options: Any) -> Any:
    """Build an engine without storage, for weights of ``owner``."""
    engine = cls(*args, device="meta", **options)
    engine.__dict__.update(owner=owner, param_init_meta={})  # no submodule; no closures, which do not pickle
    engine.drop_parameters()
    return engine


@final
class NormUnit:
    """Computes a norm, and one GEMM for all linear layers that read its output; or the norm and a whole MLP."""

    def __init__(self, candidate: NormCandidate, options: Options, *, whole_mlp: bool) -> None:
        self.options = options
        self.linears: list[Any] = list(candidate.linears.values())
        self.down: Any = None
        self.readers: list[Any] = [candidate.inside] if whole_mlp else self.linears
        """The modules that read the norm's output."""
        norm, first = candidate.norm, self.linears[0]
        shared: dict[str, Any] = {
            "normalization": "LayerNorm" if isinstance(norm, nn.LayerNorm) else "RMSNorm",
            "eps": norm.eps if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else norm.variance_epsilon,
            "bias": first.bias is not None,
            "params_dtype": first.weight.dtype,
        }
        if whole_mlp:
            (self.down,) = candidate.down.values()
            shared["activation"] = activation_name(candidate.activation, gated=len(self.linears) > 1)
            self.engine = build(NormMLPEngine, first, first.in_features, self.down.in_features, **shared)
        else:
            out_features = sum(linear.out_features for linear in self.linears)
            self.engine = build(NormLinearEngine, first, first.in_features, out_features, **shared)
        self.engines = {"": self.engine}

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights that one GEMM joins, and the biases, if there are any."""
        weights = [linear.weight for linear in self.linears]
        return weights, [linear.bias for linear in self.linears if linear.bias is not None]

    def place_beside(self) -> None:
        """Place the weights beside each other in memory, and the biases, where nothing else looks at their memory."""
        for parts in filter(None, self.parts()):
            place_beside(parts)

    def place_apart(self) -> None:
        """Give weights and biases memory of their own again."""
        for parts in filter(None, self.parts()):
            place_apart(parts)

    @outside_of_graphs
    def __call__(self, norm: Any, x: Tensor) -> tuple[Tensor, ...]:
        """[*, K] -> [*, N] for each reader; dtype of autocast, or x's without."""
        self.engine.note_sharding()
        weights, biases = self.parts()
        if not (self.engine._is_fsdp2 or are_beside(weights)):
            self.place_beside()
        joined, bias = join_weights(weights), join_weights(biases) if biases else None
        parameters = {"layer_norm_weight": norm.weight, "layer_norm_bias": getattr(norm, "bias", None)}
        if self.down is None:
            parameters |= {"weight": joined, "bias": bias}
        else:
            parameters |= {
                "fc1_weight": joined,
                "fc1_bias": bias,
                "fc2_weight": self.down.weight,
                "fc2_bias": self.down.bias,
            }
        tensors = [x, *(tensor for tensor in parameters.values() if tensor is not None)]
        trains = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if self.down is not None and trains and not (x.requires_grad or norm.weight.requires_grad):
            # Frozen norms behind a frozen embedding: LayerNormMLP (Transformer Engine 2.20) asks whether the bias of an
            # RMSNorm trains, which there is not, unless the input needs a gradient.
            x = x.detach().requires_grad_()
        # zeros would change the amax: a LayerNorm makes its bias of them
        rows = pad_rows(x, self.options.token_alignment, repeat_last=True)
        with self.options.precision(self.engine, norm.training), torch.set_grad_enabled(trains):
            output = self.engine.compute(parameters, rows)
        save_parts(output, joined, weights)
        sizes = [linear.out_features for linear in self.linears] if self.down is None else [self.down.out_features]
        return torch.split(cut_rows(output, x), sizes, dim=-1)
