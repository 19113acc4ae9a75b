"""A layer that does a Linear's work by Transformer Engine: the module and its Parameters stay those of the user.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

The class of the module changes, and it gets the attributes that Transformer Engine's constructor would have set. The
module is still an instance of its class. Nothing is added to the state dict, because Transformer Engine's
``_extra_state`` is a pickle; the scales of delayed scaling are in the plugin's state
(:mod:`~lightning_lowprec.te.delayed_scaling`).

Transformer Engine takes weights as [N, K]. A weight that is stored as [K, N] is transposed for it: one copy in the
dtype of the weight, each time the weight is quantised, and none where a quantised weight is used again. The first
gradient of a step is copied once more, into the layout of the weight.

docs/architecture.md draws the life of a weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Literal, final

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.export import is_in_onnx_export_mode

from lightning_lowprec.conversion.in_place import become, derived, revert
from lightning_lowprec.conversion.layer_runs import note_run
from lightning_lowprec.conversion.matmuls import is_conv1d, linears
from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.steps import Seen, seen, watch
from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.numerics.wire_format import WireFormat
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.private.torch import (
    are_transforms_active,
    is_exporting,
    is_in_backward,
    saved_tensors_are_hooked,
)
from lightning_lowprec.products.transforms import check_call, without_second_gradient
from lightning_lowprec.te.fp8_weight import (
    Fp8Weight,
    FrozenWeight,
    for_gemm,
    gather_refusal,
    store_in_fp8,
    store_in_full,
)
from lightning_lowprec.te.recipes import HIGH_PRECISION


def check_input(input: Tensor) -> None:
    """Raise RuntimeError if ``input`` is on a device for which Transformer Engine has no kernels."""
    if not input.is_cuda and not is_in_onnx_export_mode():
        if is_exporting():
            check_call("a layer of Transformer Engine")
        raise RuntimeError(
            f"A layer of Transformer Engine got an input on {input.device}, and computes on CUDA only. Move the model"
            " and its batches there: Trainer does, and in Fabric `setup` and `setup_dataloaders`."
        )


def recomputation(layer: Any) -> AbstractContextManager[None]:
    """Return Transformer Engine's context for a forward that a checkpoint runs again in a backward pass.

    torch's checkpoints restore torch's autocast only: without this context the forward would run in high precision.
    """
    recipe = layer.fp8_meta["recipe"]
    if recipe.delayed():
        raise RuntimeError(
            "`torch.utils.checkpoint` recomputes a layer of Transformer Engine in the backward pass, when delayed"
            " scaling has renewed its scales. Use `transformer_engine.pytorch.checkpoint`, the strategy's"
            " `activation_checkpointing=True` ('fsdp2'), a recipe without a history (`FP8TE('current')`), or with"
            " transformers turn its gradient checkpointing on before the model is set up."
        )
    context: AbstractContextManager[None] = te.autocast(enabled=True, recipe=recipe)
    return context


_STATE: Any = transformer_engine.manager()
"""Holds ``quantization_state``, Transformer Engine's state of the process."""


@final
class WeightCache:
    """The choice of ``is_first_microbatch`` for one layer, which learns whether weights are used more than once.

        True    quantise the weight and keep the result
        False   use the result that was kept
        None    quantise the weight for this call

    A kept weight that is stale gives wrong gradients without an error: `conversion/steps.py` says when a weight is the
    same. ``eval()`` always has the weight quantised anew.

    Without accumulation no weight is used twice: then nothing is kept and no memory is spent. Otherwise the codes and
    their transpose take 2 bytes per parameter. ``always`` keeps every quantised weight, for evaluation too.
    """

    def __init__(self, *, always: bool = False) -> None:
        watch()
        self.always = always
        self.used_again = False
        """Whether the weight was used more than once since the last step. A resumed run sets it."""
        self.kept = False
        """Whether the quantised weight is kept; one that is still stored is of no use else."""
        self._seen: Seen | None = None

    def is_first_microbatch(self, weight: Tensor, *, training: bool = True) -> bool | None:
        """Return the argument for a forward with gradients, or for any forward if weights are always kept.

        The mode counts because averaged weights, which change no version, may be in place during evaluation.
        """
        now = seen(weight, training=training, steps=weight.requires_grad or not self.always)
        if now != self._seen:
            self._seen = now
            self.kept = self.always or self.used_again
            self.used_again = False
            return True if self.kept else None
        self.used_again = True
        was_kept, self.kept = self.kept, True
        return not was_kept

    def forget(self) -> None:
        """Have the next forward quantise the weight anew."""
        self._seen = None


class TELayer(PlainFirst, te.Linear):  # type: ignore[misc]
    """A layer with Transformer Engine's GEMMs, for any batch: the work of a Linear."""

    in_by_out: ClassVar[bool]
    """Whether the weight is stored as [K, N], instead of [N, K]."""
    fp8_eval: bool
    token_alignment: int
    """The number of which the rows of the recipe's GEMMs must be multiples."""
    weight_cache: WeightCache | None
    wire_format: WireFormat | None
    """The format in which FSDP2 may gather the weight; None: in high precision."""
    own_recipe: Any
    """None: the recipe of the plugin's context; a recipe of this layer; or ``HIGH_PRECISION``: no FP8."""
    # set by Transformer Engine
    in_features: int
    out_features: int
    weight: Any
    fp8: bool
    """Whether the last forward ran in FP8."""
    fp8_meta: dict[str, Any]
    activation_dtype: torch.dtype
    _fp8_workspaces: dict[str, Any]
    """Quantised weights that are kept."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        note_run(self)
        if (
            not torch.compiler.is_compiling()
            and _STATE.quantization_state.fp8_enabled  # inside of the plugin's context
            and input.is_cuda
            and (self.training or self.fp8_eval)
            and not torch.is_inference_mode_enabled()
            and input.shape[-1:] == (self.in_features,)
            and input.is_floating_point()
            and input.numel()
            and self.own_recipe is None
        ):
            return self._multiply(input, self._is_first_microbatch(input))
        return self._unusual_forward(input)

    def _unusual_forward(self, input: Tensor) -> Tensor:
        """Compute what is no call in the plugin's context: compiled, outside of it, in high precision, or refused."""
        # the compiler does not trace this question; the plugin's `forward_context` has left inference mode before
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            # the first forward makes buffers that training writes to
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        check_input(input)
        if input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self.plain_forward(input)  # raises as nn.Linear does
        own = self.own_recipe
        if input.numel() == 0 or not (self.training or self.fp8_eval) or own is HIGH_PRECISION:
            return self.plain_forward(input)
        if self.fp8 and not _STATE.is_fp8_enabled() and is_in_backward():
            with recomputation(self):
                return self._multiply(input, self._is_first_microbatch(input))
        if own is not None and _STATE.is_fp8_enabled():
            with te.autocast(enabled=True, recipe=own):
                return self._multiply(input, self._is_first_microbatch(input))
        in_autocast = _STATE.quantization_state.autocast_depth or is_in_onnx_export_mode()
        if torch.is_grad_enabled() and self.training and not in_autocast:  # not even in one that disables FP8
            warnings.warn(
                "A layer of Transformer Engine trains outside of its precision's context, and so in high precision. In"
                " Fabric call the module that `setup` returned, or enter `fabric.autocast()`; on one device Fabric"
                " calls other methods than `forward` (`training_step`, marked ones) without any precision.",
                stacklevel=4,
            )
        return self._multiply(input, self._is_first_microbatch(input))

    def _multiply(self, input: Tensor, is_first_microbatch: bool | None) -> Tensor:
        if (are_transforms_active() or torch.compiler.is_exporting()) and not is_in_onnx_export_mode():
            check_call(type(self).__name__)
        fits = input.numel() // self.in_features % self.token_alignment == 0
        rows = input if fits else pad_rows(input, self.token_alignment)
        output: Tensor = te.Linear.forward(self, rows, is_first_microbatch)
        if not torch.compiler.is_compiling():
            output = without_second_gradient(output)
        return output if fits else cut_rows(output, input)

    def _is_first_microbatch(self, input: Tensor) -> bool | None:
        cache, weight = self.weight_cache, self._weight()
        if cache is None or torch.compiler.is_compiling() or isinstance(weight, Fp8Weight):
            return None
        if not (cache.always or torch.is_grad_enabled()):
            return None
        # A checkpoint that is not reentrant numbers the saved tensors. A weight that is kept is saved as one tensor, a
        # weight that is quantised for one call as several; forward and recomputation must save the same tensors.
        if saved_tensors_are_hooked():
            return None
        stored = self._fp8_workspaces
        first = cache.is_first_microbatch(weight, training=self.training)
        if stored and not (cache.kept and _is_usable(stored.get("weight"), input)):
            stored.clear()
        return first

    def _get_weight_tensors(self) -> list[Tensor]:
        """Return the weight as Transformer Engine's forward takes it (an override).

        A backward pass in high precision multiplies by this very tensor, so it has the autocast dtype.
        """
        in_high_precision = self.fp8 and self.fp8_meta["recipe"].backward_override == "high_precision"
        if self.in_by_out:
            weight = self._weight().t()
            if in_high_precision:
                weight = weight.to(self.activation_dtype)
            return [weight if self.fp8 and not in_high_precision else weight.contiguous()]
        if in_high_precision:
            return [self.weight.to(self.activation_dtype)]
        weight = self._weight()
        if isinstance(weight, Fp8Weight):
            return [for_gemm(weight, transformer_engine.weight_quantizer(self) if self.fp8 else None)]
        return [weight]

    def _weight(self) -> Tensor:
        """Return the weight without a search through the module's attributes."""
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight  # weight_norm computes it

    @property
    def reads_values(self) -> bool:
        """Whether a product that reads the weight runs in high precision: FSDP2 then gathers the values."""
        own = self.own_recipe
        return own is not None and (own is HIGH_PRECISION or gather_refusal(own) is not None)

    def train(self, mode: bool = True) -> TELayer:
        """Set the mode; ``eval()`` has the weight quantised anew, since ``weight.data`` may have been written to."""
        if self.weight_cache is not None and not mode:
            self.weight_cache.forget()
        super().train(mode)
        return self

    register_parameter = nn.Module.register_parameter  # Transformer Engine's keeps a closure, which does not pickle
    # with torch's own methods there is no extra state to save or to load
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, FrozenWeight):
            destination[prefix + "weight"] = self.weight.values().to(self.weight.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Return what deepcopy and pickle keep: the scales, but no quantised weight and no place in global buffers."""
        cache = None if self.weight_cache is None else WeightCache(always=self.weight_cache.always)
        return {**self.__dict__, **transformer_engine.copied_attributes(self), "weight_cache": cache}


def _is_usable(workspace: Any, input: Tensor) -> bool:
    """Return whether a kept weight can be used; Transformer Engine checks its own quantised tensors only.

    A CustomRecipe may make something that is no tensor. A graph that awaits its backward may own its ``data``; its
    transpose ``data_t`` is missing if no input has needed a gradient so far.
    """
    if workspace is None or isinstance(workspace, Tensor):
        return True
    names = ("data", "data_t") if input.requires_grad else ("data",)
    return all(getattr(workspace, name, None) is not None for name in names)


@final
class TELinear(TELayer, nn.Linear):
    """A Linear with Transformer Engine's GEMMs."""

    in_by_out = False
    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr


@final
class TEConv1D(TELayer):
    """transformers' ``Conv1D`` (GPT-2), whose weight is [in, out], with Transformer Engine's GEMMs.

    The class of a layer derives from ``Conv1D`` too, for transformers and PEFT.
    """

    in_by_out = True

    @property
    def reset_parameters(self) -> None:
        """A Conv1D has no such method, and Transformer Engine's is for weights of the other layout."""
        raise AttributeError("Conv1D has no `reset_parameters`")

    def __repr__(self) -> str:
        return f"TEConv1D(nf={self.out_features}, nx={self.in_features})"


def convert_linears(
    model: nn.Module,
    fqns: Collection[str],
    *,
    fp8_eval: bool,
    token_alignment: int,
    weight_cache: bool | Literal["always"],
    wire_format: WireFormat | None = None,
    custom: bool = False,
) -> None:
    """Make the Linears and Conv1Ds named by ``fqns`` TELayers with these options, and all other TELayers plain again.

    With a custom recipe torch adds the bias: Transformer Engine's own backward of a bias quantises ``grad_output`` in
    the same kernel, which takes Transformer Engine's own quantizers only.
    """
    for layer in te_linears(model):
        store_in_full(layer)
    linear: Any
    for fqn, linear in linears(model).items():
        if fqn not in fqns:
            if isinstance(linear, TELayer):
                revert(linear)
            continue
        bias = linear.bias is not None
        attributes: dict[str, Any] = {
            "fp8_eval": fp8_eval,
            "token_alignment": token_alignment,
            "wire_format": None if is_conv1d(linear) else wire_format,
            "weight_cache": WeightCache(always=weight_cache == "always") if weight_cache else None,
            "own_recipe": None,
            "gemm_bias_unfused_add": custom and bias,
            "param_init_meta": {},  # Transformer Engine's holds closures, which do not pickle
            "_fp8_workspaces": {},  # weights that were kept under other options may never be used again
        }
        if not isinstance(linear, TELayer):
            _become_te(linear, fqn, later=attributes)
        for name in transformer_engine.SHARDING_CACHES:
            vars(linear).pop(name, None)
        vars(linear).update(attributes)


def _become_te(linear: Any, fqn: str, later: Iterable[str]) -> None:
    cls: type[nn.Module] = TELinear
    sizes = linear.weight.shape[::-1]
    if is_conv1d(linear):
        cls = derived(TEConv1D, type(linear))
        sizes = linear.weight.shape
    options = {"bias": linear.bias is not None, "params_dtype": linear.weight.dtype, "name": fqn or None}
    built = te.Linear(*sizes, device="meta", **options)
    become(linear, cls, vars(built), later=(*later, *transformer_engine.SET_BY_FORWARD))


def revert_linears(model: nn.Module) -> None:
    """Give every TELayer of ``model`` its own class back, in place."""
    for layer in te_linears(model):
        store_in_full(layer)
        revert(layer)


def store_frozen_in_fp8(model: nn.Module, device: torch.device) -> None:
    """Store the weights of TELinears that do not train in FP8 alone, on ``device``; weights on meta stay.

    The codes of a Conv1D would be transposed at each forward, so a Conv1D keeps its values.
    """
    for layer in te_linears(model):
        if layer.in_by_out:
            continue
        weight = layer._parameters.get("weight")  # no Parameter where `weight_norm` computes it
        if weight is not None and not (weight.requires_grad or weight.is_meta or isinstance(weight, Fp8Weight)):
            store_in_fp8(layer, device)


def te_linears(model: nn.Module) -> list[TELayer]:
    """Return the Linears and Conv1Ds of ``model`` that are converted."""
    return [module for module in model.modules() if isinstance(module, TELayer)]
