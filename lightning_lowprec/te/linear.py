"""torch's Linear as Transformer Engine's, in place: the module and its Parameters stay the objects they are.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

The class changes, and the attributes are added that Transformer Engine's constructor would have set. It is an
``nn.Linear`` still. Nothing is added to the state dict: Transformer Engine's ``_extra_state`` is pickle; the scales of
delayed scaling go elsewhere (see :mod:`~lightning_lowprec.te.scales`).

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any, ClassVar, Final, Literal

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.constants import FP8FwdTensorIdx
from transformer_engine.pytorch.export import is_in_onnx_export_mode
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec.numerics.wire_format import WireFormat
from lightning_lowprec.te import scales
from lightning_lowprec.te.fp8_weight import Fp8Weight, FrozenWeight, store_in_fp8, store_in_full
from lightning_lowprec.te.weight_cache import WeightCache
from lightning_lowprec.te.wire_format import for_gemm

_WHERE_IT_RUNS: Final = ("_is_fsdp2", "_te_cached_parent_fsdp_state")
"""What Transformer Engine finds out at the first forward and never asks again: whether FSDP2 gathers the weight."""
_SET_BY_FORWARD: Final = (
    "fp8_parameters",
    "allow_different_data_and_param_types",
    "forwarded_at_least_once",
    *_WHERE_IT_RUNS,
)


def check_input(input: Tensor) -> None:
    """Raise RuntimeError if ``input`` is where Transformer Engine has no kernels."""
    if not input.is_cuda and not is_in_onnx_export_mode():
        raise RuntimeError(
            f"A layer of Transformer Engine got an input on {input.device}, and computes on CUDA only. Move the model"
            " and its batches there: Trainer does, and in Fabric `setup` and `setup_dataloaders`."
        )


def _warn_outside_of_autocast() -> None:
    """Transformer Engine then computes in high precision without a word; ``te.autocast(enabled=False)`` is a wish."""
    if FP8GlobalStateManager.quantization_state.autocast_depth == 0 and not is_in_onnx_export_mode():
        warnings.warn(
            "A layer of Transformer Engine trains outside of its precision's context, and so in high precision. In"
            " Fabric call the module that `setup` returned, or enter `fabric.autocast()`; on one device Fabric calls"
            " other methods than `forward` (`training_step`, marked ones) without any precision.",
            stacklevel=3,
        )


class TELinear(te.Linear, nn.Linear):  # type: ignore[misc]
    """A Linear with Transformer Engine's GEMMs, for any batch."""

    own_class: ClassVar = nn.Linear
    """What it was."""
    fp8_eval: bool
    """Whether evaluation runs in FP8 too."""
    token_alignment: int
    """Rows that the GEMMs take are multiples of this; zero rows are appended and cut off again."""
    weight_cache: WeightCache | None
    wire_format: WireFormat | None
    """How FSDP2 may gather the weight (see ``layers.wire``)."""
    fp8: bool
    """Transformer Engine's: whether the last forward ran in FP8."""
    fp8_meta: dict[str, Any]
    activation_dtype: torch.dtype
    _fp8_workspaces: dict[str, Any]
    quantizers: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        check_input(input)
        if input.numel() == 0:
            return F.linear(input, self.weight, self.bias)
        # the first forward makes buffers that training writes to, and inference tensors cannot be written to
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        if not (self.training or self.fp8_eval):
            return F.linear(input, self.weight, self.bias)
        if self.fp8 and not FP8GlobalStateManager.is_fp8_enabled() and torch._C._current_graph_task_id() != -1:
            return self._recompute(input)
        if torch.is_grad_enabled() and self.training:
            _warn_outside_of_autocast()
        return self._multiply(input, self._is_first_microbatch(input))

    def _recompute(self, input: Tensor) -> Tensor:
        """The forward again, within a backward pass, by a checkpoint that knows torch's autocast only."""
        recipe = self.fp8_meta["recipe"]
        if recipe.delayed():
            raise RuntimeError(
                "`torch.utils.checkpoint` recomputes a layer of Transformer Engine in the backward pass, when delayed"
                " scaling has renewed its scales. Use `transformer_engine.pytorch.checkpoint`, the strategy's"
                " `activation_checkpointing=True` ('fsdp2'), a recipe without a history (`FP8TE('current')`), or with"
                " transformers turn its gradient checkpointing on before the model is set up."
            )
        with te.autocast(enabled=True, recipe=recipe):
            return self._multiply(input, self._is_first_microbatch(input))

    def _multiply(self, input: Tensor, is_first_microbatch: bool | None) -> Tensor:
        tokens = input.numel() // self.in_features
        padding = -tokens % self.token_alignment
        if padding == 0:
            output: Tensor = te.Linear.forward(self, input, is_first_microbatch)
            return output
        rows = F.pad(input.reshape(tokens, self.in_features), (0, 0, 0, padding))
        output = te.Linear.forward(self, rows, is_first_microbatch)[:tokens]
        return output.reshape(*input.shape[:-1], self.out_features)

    def _is_first_microbatch(self, input: Tensor) -> bool | None:
        if self.weight_cache is None or torch.compiler.is_compiling() or isinstance(self.weight, Fp8Weight):
            return None
        if not (torch.is_grad_enabled() or self.weight_cache.always):
            return None
        # a checkpoint that is not reentrant tells saved tensors by their number, and a kept weight is one of them where
        # one for this call is several: forward and recomputation must do the same
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return None
        if not _serves(self._fp8_workspaces.get("weight"), input):
            self._fp8_workspaces.clear()
        first = self.weight_cache.is_first_microbatch(self.weight, training=self.training)
        if self.weight_cache.is_idle:
            self._fp8_workspaces.clear()
        return first

    def _get_weight_tensors(self) -> list[Tensor]:
        """Transformer Engine's; in the autocast dtype if a backward in high precision will multiply by them as is."""
        if self.fp8 and self.fp8_meta["recipe"].backward_override == "high_precision":
            return [self.weight.to(self.activation_dtype)]
        if isinstance(self.weight, Fp8Weight):
            quantizers = self.quantizers["scaling_fwd"]
            return [for_gemm(self.weight, quantizers[FP8FwdTensorIdx.GEMM1_WEIGHT] if self.fp8 else None)]
        return [self.weight]

    def train(self, mode: bool = True) -> TELinear:
        """As ``nn.Module``'s; ``eval()`` also has weights quantised anew that were written to through ``data``."""
        if self.weight_cache is not None and not mode:
            self.weight_cache.forget()
        return super().train(mode)

    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr
    register_parameter = nn.Module.register_parameter  # Transformer Engine's keeps a closure, which does not pickle
    # without these torch finds no extra state to save, and asks for none
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, FrozenWeight):
            destination[prefix + "weight"] = self.weight.values().to(self.weight.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle keep: scales, but no quantised weights and no place in global buffers."""
        cache = None if self.weight_cache is None else WeightCache(always=self.weight_cache.always)
        return {**self.__dict__, **scales.detached(self), "_fp8_workspaces": {}, "weight_cache": cache}


def convert_linears(model: nn.Module, fqns: Collection[str], **options: Any) -> None:
    """Make the Linears named by ``fqns`` TELinears, and all other TELinears Linears again.

    Args:
        model: changed in place. A TELinear that stays one keeps its scales.
        fqns: ``""`` is the model itself.
        options: see :func:`convert_linear`.
    """
    for fqn, module in list(model.named_modules()):
        if fqn in fqns:
            convert_linear(module, fqn=fqn, **options)
        elif isinstance(module, TELinear):
            revert_linear(module)


def revert_linears(model: nn.Module) -> None:
    """Make every TELinear of ``model`` a Linear again, in place."""
    for layer in te_linears(model):
        revert_linear(layer)


def convert_linear(
    linear: nn.Module,
    *,
    fp8_eval: bool,
    token_alignment: int,
    weight_cache: bool | Literal["always"],
    wire_format: WireFormat | None = None,
    custom: bool = False,
    fqn: str = "",
) -> None:
    """Make a Linear a TELinear, in place; of a TELinear, change the options.

    Args:
        linear: exactly ``nn.Linear``, on any device, meta too; or a TELinear.
        fp8_eval: whether evaluation runs in FP8 too.
        token_alignment: rows that the recipe's GEMMs take are multiples of this.
        weight_cache: use quantised weights again between optimizer steps (see ``weight_cache``); ``"always"`` keeps
            them whether or not there is accumulation, and for evaluation.
        wire_format: how FSDP2 may gather the weight; None: in high precision.
        custom: whether the recipe is a CustomRecipe: then torch adds the bias. Transformer Engine's own backward of it
            quantises ``grad_output`` in the same kernel, which takes no quantizers but its own.
        fqn: what a CustomRecipe's function is told of the layer, as the role's ``name``.
    """
    store_in_full(linear)
    if not isinstance(linear, TELinear):
        donor = _donor(linear, fqn or None)
        added = donor.__dict__.keys() - linear.__dict__.keys() - linear._parameters.keys()
        linear.__class__ = TELinear
        linear.__dict__.update({name: donor.__dict__[name] for name in added}, param_init_meta={})  # holds closures
    for name in _WHERE_IT_RUNS:
        linear.__dict__.pop(name, None)
    cache = WeightCache(always=weight_cache == "always") if weight_cache else None
    unfused = custom and linear.bias is not None
    options = {"fp8_eval": fp8_eval, "token_alignment": token_alignment, "wire_format": wire_format}
    # what was kept under other options may never be asked for again
    linear.__dict__.update(options, weight_cache=cache, gemm_bias_unfused_add=unfused, _fp8_workspaces={})


def revert_linear(linear: nn.Module) -> None:
    """Make a TELinear the Linear it was, in place."""
    store_in_full(linear)
    added = _donor(linear).__dict__.keys() - nn.Linear(1, 1, device="meta").__dict__.keys()
    for name in (*added, *TELinear.__annotations__, *_SET_BY_FORWARD):
        linear.__dict__.pop(name, None)
    linear.__class__ = nn.Linear


def store_frozen_in_fp8(model: nn.Module, device: torch.device) -> None:
    """Keep the weights of TELinears that do not train in FP8 alone, on ``device`` (see ``coded``), but none on meta."""
    for layer in te_linears(model):
        weight = layer._parameters.get("weight")  # none where `weight_norm` computes it
        if weight is not None and not (weight.requires_grad or weight.is_meta or isinstance(weight, Fp8Weight)):
            store_in_fp8(layer, device)


def te_linears(model: nn.Module) -> list[TELinear]:
    """The layers of ``model`` that are converted already."""
    return [module for module in model.modules() if isinstance(module, TELinear)]


def _serves(workspace: Any, input: Tensor) -> bool:
    """Whether what was kept can be used; Transformer Engine asks that of its own quantised tensors only.

    What a CustomRecipe's quantizer made may be no tensor: then it is with a graph that awaits its backward as a whole,
    or lacks the transpose (``data_t``) because no input has needed a gradient so far.
    """
    if workspace is None or isinstance(workspace, Tensor):
        return True
    names = ("data", "data_t") if input.requires_grad else ("data",)
    return all(getattr(workspace, name, None) is not None for name in names)


def _donor(linear: Any, name: str | None = None) -> Any:
    """What Transformer Engine makes of the same arguments; it has no memory of its own."""
    return te.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
        name=name,
    )
