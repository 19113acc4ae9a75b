"""A layer that does a Linear's work by Transformer Engine: the module and its Parameters stay those of the user.

The class of the module changes, and it gets the attributes that Transformer Engine's constructor would have set.
Nothing is added to the state dict, because Transformer Engine's ``_extra_state`` is a pickle; the scales of delayed
scaling are in the plugin's state (`delayed_scaling.py`). docs/architecture.md draws the life of a weight.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, final

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn

from lightning_lowprec.conversion.declared import PlainFirst, is_declared
from lightning_lowprec.conversion.in_place import become, revert
from lightning_lowprec.conversion.layer_runs import note_run
from lightning_lowprec.conversion.matmuls import linears
from lightning_lowprec.messages import warn
from lightning_lowprec.numerics.casts import LayerNumerics
from lightning_lowprec.numerics.formats import power_of_two_scale
from lightning_lowprec.numerics.kernel_operands import cut_rows, pad_rows
from lightning_lowprec.numerics.weight_rounding import WeightRounding, nearest_scale
from lightning_lowprec.private import torch as private
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.private.torch_optimizers import Seen, seen, watch
from lightning_lowprec.products.transforms import check_call, without_second_gradient
from lightning_lowprec.te.recipes import alignment_of, kind_of, rounding_of


def check_input(input: Tensor) -> None:
    """Raise RuntimeError if ``input`` is on a device for which Transformer Engine has no kernels."""
    if not input.is_cuda:
        if private.is_exporting():
            check_call("a layer of Transformer Engine")
        raise RuntimeError(
            f"A layer of Transformer Engine got an input on {input.device}, and computes on CUDA only. Move the model"
            " and its batches there: Trainer does, and in Fabric `setup` and `setup_dataloaders`."
        )


_STATE: Any = transformer_engine.manager()  # has ``quantization_state``, Transformer Engine's of the process


@final
class TELinear(PlainFirst, te.Linear, nn.Linear):  # type: ignore[misc]
    """A Linear with Transformer Engine's GEMMs, for any batch.

    With ``keep_weights`` the quantised weight is kept until the next optimizer step, in Transformer Engine's own cache:
    ``is_first_microbatch`` is True for a weight that may have changed since the last forward
    (:func:`~lightning_lowprec.private.torch_optimizers.seen`), else False. ``eval()`` has the weight quantised anew.
    """

    fp8_eval: bool
    token_alignment: int
    """The number of which the rows of the recipe's GEMMs must be multiples."""
    keep_weights: bool
    weight_seen: Seen | None
    """The weight whose codes are kept."""
    recipe: Any
    """The recipe of the plugin's context."""
    weight: Any
    fp8: bool
    """Whether the last forward ran in FP8, as Transformer Engine notes."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, N] in the autocast dtype, or in the input's without autocast."""
        note_run(self)
        # the compiler does not trace this question; the plugin's `forward_context` has left inference mode before
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and torch.is_inference_mode_enabled():
            # the first forward makes buffers that training writes to
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(input)
        check_input(input)
        plain = not (self.training or self.fp8_eval) or not input.numel()
        if plain or input.shape[-1:] != (self.in_features,) or not input.is_floating_point():
            return self.plain_forward(input)  # raises for another shape or dtype, as nn.Linear does
        if is_compiling or not _STATE.is_fp8_enabled():
            return self._outside(input)
        return self._multiply(input)

    def _outside(self, input: Tensor) -> Tensor:
        """Compute outside of the plugin's context, or compiled: recomputed in FP8, or in high precision."""
        if self.fp8 and not _STATE.is_fp8_enabled() and private.is_in_backward():
            if self.recipe.delayed():
                raise RuntimeError(
                    "`torch.utils.checkpoint` recomputes a layer of Transformer Engine in the backward pass, when"
                    " delayed scaling has renewed its scales. Use `transformer_engine.pytorch.checkpoint`, the"
                    " strategy's `activation_checkpointing=True` ('fsdp2'), a recipe without a history"
                    " (`FP8TE('current')`), or with transformers turn its gradient checkpointing on before the model is"
                    " set up."
                )
            # torch's checkpoints restore torch's autocast only
            with te.autocast(enabled=True, recipe=self.recipe):
                return self._multiply(input)
        in_autocast = _STATE.quantization_state.autocast_depth  # also in one that disables FP8
        if torch.is_grad_enabled() and self.training and not in_autocast:
            warn(
                "A layer of Transformer Engine trains outside of its precision's context, and so in high precision. In"
                " Fabric call the module that `setup` returned, or enter `fabric.autocast()`; on one device Fabric"
                " calls other methods than `forward` (`training_step`, marked ones) without any precision.",
                stacklevel=4,
            )
        return self._multiply(input)

    def _multiply(self, input: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(input.device.type) and is_declared(self):
            return self.declared_forward(input)
        if private.are_transforms_active() or torch.compiler.is_exporting():
            check_call(type(self).__name__)
        fits = input.numel() // self.in_features % self.token_alignment == 0
        rows = input if fits else pad_rows(input, self.token_alignment)
        output: Tensor = te.Linear.forward(self, rows, self._is_first_microbatch())
        if not torch.compiler.is_compiling():
            output = without_second_gradient(output)
        return output if fits else cut_rows(output, input)

    def _is_first_microbatch(self) -> bool | None:
        if not self.keep_weights or torch.compiler.is_compiling():
            return None
        # A checkpoint that is not reentrant numbers the saved tensors. A weight that is kept is saved as one tensor, a
        # weight that is quantised for one call as several; forward and recomputation must save the same tensors.
        if private.saved_tensors_are_hooked():
            return None
        before, weight = self.weight_seen, self._parameters.get("weight", self.weight)
        self.weight_seen = seen(weight, training=self.training, steps=weight.requires_grad)
        return self.weight_seen != before

    def _get_weight_tensors(self) -> list[Tensor]:
        """Return the weight as Transformer Engine's forward takes it (an override).

        A backward pass in high precision multiplies by this very tensor, so it has the autocast dtype.
        """
        if self.fp8 and self.recipe.backward_override == "high_precision":
            return [self.weight.to(self.activation_dtype)]
        return [self.weight]

    def train(self, mode: bool = True) -> "TELinear":
        """Set the mode; ``eval()`` has the weight quantised anew, since ``weight.data`` may have been written to."""
        if not mode:
            self.weight_seen = None
        super().train(mode)
        return self

    reset_parameters = nn.Linear.reset_parameters
    extra_repr = nn.Linear.extra_repr
    register_parameter = PlainFirst.register_parameter  # Transformer Engine's keeps a closure, which does not pickle
    # with torch's own methods there is no extra state to save or to load
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __getstate__(self) -> dict[str, object]:
        """Return what deepcopy and pickle keep: the scales, but no quantised weight and no place in global buffers."""
        return {**self.__dict__, **transformer_engine.copied_attributes(self), "weight_seen": None}


def convert_linears(
    model: nn.Module, fqns: Collection[str], recipe: object, *, fp8_eval: bool = True, keep_weights: bool = False
) -> None:
    """Make the Linears named by ``fqns`` TELinears with these options, and all other TELinears plain again."""
    if keep_weights:
        watch()
    attributes: dict[str, object] = {
        "fp8_eval": fp8_eval,
        "token_alignment": alignment_of(recipe),
        "keep_weights": keep_weights,
        "weight_seen": None,
        "recipe": recipe,
        "param_init_meta": {},  # Transformer Engine's holds closures, which do not pickle
    }
    linear: Any
    for fqn, linear in linears(model).items():
        if fqn not in fqns:
            if isinstance(linear, TELinear):
                revert(linear)
            continue
        if not isinstance(linear, TELinear):
            options = {"bias": linear.bias is not None, "params_dtype": linear.weight.dtype, "name": fqn or None}
            built = te.Linear(*linear.weight.shape[::-1], device="meta", **options)
            become(linear, TELinear, vars(built), later=(*attributes, *transformer_engine.SET_BY_FORWARD))
        for name in transformer_engine.SHARDING_CACHES:
            vars(linear).pop(name, None)
        vars(linear).update(attributes, _fp8_workspaces={})  # kept codes of other options may never be used again


# ---- what the registry asks


def numerics_of(layer: nn.Module) -> LayerNumerics | None:
    """Return the weight of a TELinear, by which the error of its output is measured; None for a norm."""
    casts = dict.fromkeys(("input", "weight", "gradient"), "Transformer Engine scales inside of its module")
    return LayerNumerics(**casts, values=layer.weight) if isinstance(layer, TELinear) else None


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding]:
    """Return the rounding of a TELinear's weight; other layers, and recipes with a scale per 32 values, have none."""
    rounding = rounding_of(kind_of(layer.recipe)) if isinstance(layer, TELinear) else None
    if rounding is None:
        return {}
    chosen = getattr(layer.recipe, "fp8_quant_fwd_weight", None)  # delayed scaling has none
    if chosen is not None:
        rounding = replace(rounding, scale_of=power_of_two_scale if chosen.power_2_scale else nearest_scale)
    return {"weight": rounding}
