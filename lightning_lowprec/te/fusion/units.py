"""Transformer Engine's fused modules, computing with Parameters that other modules own.

An engine is built on the meta device and holds no weight: at each forward it is lent the live Parameters (gathered, if
FSDP2 shards them), and gives them back. It keeps what is its own, the scales of its FP8 tensors. It is no submodule of
the model.

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.distributed import _get_module_fsdp_state
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec.private import transformer_engine
from lightning_lowprec.te.fusion.joining import join, save_parts


def eagerly(function: Any) -> Any:
    """Run a method of a unit outside of compiled graphs, as Transformer Engine does itself, and of inference mode.

    A first forward makes buffers that training writes to, and inference tensors cannot be written to.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wrapped(*args: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*args)
        return function(*args)

    return wrapped


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all engines of a model have in common."""

    token_alignment: int = 16
    """Rows (tokens) that the recipe's GEMMs take are multiples of this: 32 for MXFP8."""
    expert_alignment: int = 16
    """The same for the tokens of each expert: 32 for MXFP8, 128 for NVFP4."""
    fp8_eval: bool = True
    """Whether evaluation runs in FP8 too."""

    def precision(self, training: bool) -> AbstractContextManager[None]:
        """The surrounding ``te.autocast``, or none."""
        if training or self.fp8_eval or not FP8GlobalStateManager.is_fp8_enabled():
            return nullcontext()
        context: AbstractContextManager[None] = te.autocast(
            enabled=False, recipe=FP8GlobalStateManager.get_fp8_recipe()
        )
        return context


class _Engine:
    """Mixed into Transformer Engine's modules: no weights of its own."""

    owner: nn.Module
    """A module whose weights it borrows."""
    is_first_microbatch: Callable[[Sequence[Tensor]], bool | None] | None = None
    """Asked at each forward with the weights; None quantises them anew each time (see Transformer Engine)."""

    def empty(self: Any) -> None:
        """Give every Parameter back."""
        self._parameters.update(dict.fromkeys(self._parameters))

    def compute(self: Any, weights: Sequence[Tensor], lent: dict[str, Tensor | None], *args: Any) -> Any:
        """Forward with ``lent`` in the place of the Parameters; ``weights`` are those that FP8 quantises."""
        first = None
        if self.is_first_microbatch is not None and torch.is_grad_enabled():
            first = self.is_first_microbatch(weights)
        self._parameters.update({name: value for name, value in lent.items() if value is not None})
        try:
            return self.forward(*args, is_first_microbatch=first)
        finally:
            self.empty()

    def note_sharding(self: Any) -> None:
        """Learn at the first forward whether FSDP2 shards the weights: if so, no FP8 copy is kept for the backward."""
        if "_is_fsdp2" not in self.__dict__:
            try:
                _get_module_fsdp_state(self.owner)
                self._is_fsdp2 = True
            except RuntimeError:
                self._is_fsdp2 = False
            self.owner.__dict__.pop("_te_cached_parent_fsdp_state", None)  # would travel with deepcopy and pickle

    def __getstate__(self: Any) -> dict[str, Any]:
        """A copy keeps the scales, in buffers that are registered at its own first forward, and no quantised weight."""
        state = {**self.__dict__, **transformer_engine.copied_attributes(self), "is_first_microbatch": None}
        state.pop("_is_fsdp2", None)
        return state


class NormLinearEngine(_Engine, te.LayerNormLinear):  # type: ignore[misc]
    """``te.LayerNormLinear`` with borrowed weights."""


class NormMLPEngine(_Engine, te.LayerNormMLP):  # type: ignore[misc]
    """``te.LayerNormMLP`` with borrowed weights."""


class GroupedEngine(_Engine, te.GroupedLinear):  # type: ignore[misc]
    """``te.GroupedLinear`` with borrowed weights."""


def build(cls: type[Any], owner: nn.Module, *args: Any, **options: Any) -> Any:
    """An engine without memory of its own, for weights of ``owner``.

    Raises:
        RuntimeError: by Transformer Engine, which constructs nothing without CUDA.
    """
    engine = cls(*args, device="meta", **options)
    engine.__dict__.update(owner=owner, param_init_meta={})  # no submodule; and no closures, which pickle refuses
    engine.empty()
    return engine


def norm_arguments(norm: nn.Module) -> dict[str, Any]:
    """How Transformer Engine calls this norm."""
    is_layer_norm = isinstance(norm, nn.LayerNorm)
    eps = getattr(norm, "eps", None) if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else norm.variance_epsilon
    return {"normalization": "LayerNorm" if is_layer_norm else "RMSNorm", "eps": eps}


class FusedUnit:
    """A norm, and one GEMM for all linear layers that read its output; or with them the whole MLP.

    Args:
        norm: LayerNorm with weight and bias, or a root-mean-square norm with a weight; K features.
        linears: those that read the norm's output, K -> N each, all with bias or none.
        options: of the model.
        down: the second linear layer of an MLP, N -> K; None for a norm and linear layers.
        activation: Transformer Engine's name of what is between; ``swiglu`` is given (gate, up).
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

    @eagerly
    def linear_outputs(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """[*, K] -> [*, N] for each of the linear layers; dtype of autocast, or x's without."""
        weights = [linear.weight for linear in self.linears]
        weight = join(weights)
        lent = {"weight": weight, "bias": self._bias(), **_norm_parameters(norm)}
        output = self._run(norm, x, weights, weight, lent)
        sizes = [linear.out_features for linear in self.linears]
        return torch.split(output, sizes, dim=-1)

    @eagerly
    def mlp_output(self, norm: nn.Module, x: Tensor) -> Tensor:
        """[*, K] -> [*, K]; dtype of autocast, or x's without."""
        if self.down is None:
            raise RuntimeError("This unit has no second linear layer.")
        weights = [linear.weight for linear in self.linears]
        weight = join(weights)
        lent = {
            "fc1_weight": weight, "fc1_bias": self._bias(), "fc2_weight": self.down.weight,
            "fc2_bias": self.down.bias, **_norm_parameters(norm),
        }  # fmt: skip
        if torch.is_grad_enabled() and _any_trains(lent.values()) and not _any_trains((x, norm.weight)):
            # frozen norms behind a frozen embedding: LayerNormMLP asks whether a bias trains that RMSNorm does not
            # have (Transformer Engine 2.20), unless its input needs a gradient
            x = x.detach().requires_grad_()
        return self._run(norm, x, [*weights, self.down.weight], weight, lent, joined=weights)

    def engines(self) -> dict[str, Any]:
        """Its only one."""
        return {"": self.engine}

    def _bias(self) -> Tensor | None:
        biases = [linear.bias for linear in self.linears if linear.bias is not None]
        return join(biases) if biases else None

    def _run(
        self,
        norm: nn.Module,
        x: Tensor,
        weights: Sequence[Tensor],
        weight: Tensor,
        lent: dict[str, Tensor | None],
        joined: Sequence[Tensor] | None = None,
    ) -> Tensor:
        self.engine.note_sharding()
        rows = padded(x, self.options.token_alignment)
        trains = torch.is_grad_enabled() and _any_trains((x, *lent.values()))
        with self.options.precision(norm.training), torch.set_grad_enabled(trains):
            output: Tensor = self.engine.compute(weights, lent, rows)
        save_parts(output, weight, joined or weights)
        tokens = x.numel() // x.shape[-1]
        return output[:tokens].reshape(*x.shape[:-1], output.shape[-1])


def _norm_parameters(norm: nn.Module) -> dict[str, Tensor | None]:
    bias = getattr(norm, "bias", None)
    return {"layer_norm_weight": norm.weight, "layer_norm_bias": bias}  # type: ignore[dict-item]


def _any_trains(tensors: Iterable[Any]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def padded(x: Tensor, alignment: int) -> Tensor:
    """[*, K] -> [M, K] with M a multiple of ``alignment``: the last row again, as often as it takes.

    A row that is there already changes no amax, of x or of anything computed row by row from x (zeros would: a
    LayerNorm makes its bias of them). The copies are detached, and cut off the output: no gradient flows through them.
    """
    rows = x.reshape(-1, x.shape[-1])
    missing = -rows.shape[0] % alignment
    return torch.cat((rows, rows[-1:].detach().expand(missing, -1))) if missing else rows
