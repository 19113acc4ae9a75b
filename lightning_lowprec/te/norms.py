"""Make LayerNorms and RMSNorms Transformer Engine's, in place.

The kernels of Transformer Engine compute in float32 inside. Under autocast they round input, weight and output to the
autocast dtype, where torch's LayerNorm returns float32.

An RMSNorm of another library is recognised by its results: a copy runs on a small input, and the output is compared
with the formulas of Llama (``weight``) and Gemma (``1 + weight``). A module that computes anything else is kept.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.pytorch.export import is_in_onnx_export_mode

from lightning_lowprec.conversion.in_place import become, revert
from lightning_lowprec.conversion.plain_first import PlainFirst
from lightning_lowprec.conversion.selection import FEATURE_ALIGNMENT
from lightning_lowprec.private.transformer_engine import multiprocessors_left, norm_kernels
from lightning_lowprec.products.transforms import refuse_second_gradient
from lightning_lowprec.te.layer import check_input

EPSILONS: Final = ("variance_epsilon", "eps", "epsilon")
"""The names of eps in the RMSNorms of transformers, torch and other libraries."""
NO_NORM: Final = "no norm"
"""The answer of :func:`reason_to_keep` for a module that is no norm."""
Formula = Literal["weight", "1 + weight"]


class _Norm(PlainFirst):
    """The common part of both norms: no extra state in the state dict; weight and bias may be missing."""

    weight: Any
    _parameters: dict[str, Any]

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, K]."""
        check_input(input)
        if input.numel() == 0:
            return input.clone()
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None:
            weight = _missing(self, "weight", input) if "weight" in self._parameters else self.weight
        if bias is None and "bias" in self._parameters:
            bias = _missing(self, "bias", input)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
        if torch.compiler.is_compiling() or is_in_onnx_export_mode() or input.shape[-1:] != weight.shape:
            return self._by_torch(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        margin = multiprocessors_left(self)["forward" if torch.is_grad_enabled() else "inference"]
        output: Tensor = _Normalise.apply(input, weight, bias, self, margin, dtype)  # type: ignore[no-untyped-call]
        return output

    def _by_torch(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the same formula by torch, for compilers, for ONNX, and for an error about another shape.

        A compiler makes one kernel of the norm and of the operations around it.
        A compiled block of the 8B shape launches 60 kernels and moves 12.04 GB (counted). With Transformer Engine's
        modules, which end graphs, it launches 73 and moves 12.96 GB.
        """
        dtype, shape = x.dtype, weight.shape
        if self.zero_centered_gamma:
            x, weight = x.float(), 1 + weight.float()
        with torch.autocast("cuda", enabled=False):  # under autocast a LayerNorm returns float32
            if bias is None:
                return F.rms_norm(x, shape, weight, self.eps).to(dtype)
            return F.layer_norm(x, shape, weight, bias, self.eps).to(dtype)

    # with torch's own methods there is no extra state to save or to load
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


@final
class TELayerNorm(_Norm, te.LayerNorm, nn.LayerNorm):  # type: ignore[misc]
    """A LayerNorm with Transformer Engine's kernels."""

    reset_parameters = nn.LayerNorm.reset_parameters
    extra_repr = nn.LayerNorm.extra_repr


@final
class TERMSNorm(_Norm, te.RMSNorm):  # type: ignore[misc]
    """An RMSNorm with Transformer Engine's kernels."""


@final
class _Normalise(torch.autograd.Function):
    """Launch the kernels that Transformer Engine's modules launch, without the pipeline that they build at each call.

        output                    = (x - mean) * rstd * weight + bias    # [rows, K]; an RMSNorm has no mean and bias
        grad_x, grad_w, grad_b    = from grad_output, x, mean, rstd, weight

    Kernels and bytes are the same (100 kernels and 14.46 GB per block of the 8B shape). The pipelines of five norms
    take 736 more Python calls per step.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, norm: Any, margin: int, dtype: torch.dtype
    ) -> Tensor:
        kernels = norm_kernels()
        x = input.contiguous().to(dtype).view(-1, weight.numel())
        options = norm.eps, None, None, kernels.dtypes[dtype], margin, norm.zero_centered_gamma
        if bias is None:
            output, _, *statistics = kernels.rms.rmsnorm_fwd(x, weight.to(dtype), *options)
        else:
            output, *statistics = kernels.layer.layernorm_fwd(x, weight.to(dtype), bias.to(dtype), *options)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.options = multiprocessors_left(norm)["backward"], norm.zero_centered_gamma
        return output.view(input.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        refuse_second_gradient(grad_output)
        x, weight, *statistics = ctx.saved_tensors
        kernels = norm_kernels()
        backward: Any = kernels.rms.rmsnorm_bwd if len(statistics) == 1 else kernels.layer.layernorm_bwd
        grad = grad_output.contiguous().to(x.dtype).view(x.shape)
        grad_x, *grads = backward(grad, x, *statistics, weight.to(x.dtype), *ctx.options)
        return grad_x.view(grad_output.shape), *grads, *(None,) * (5 - len(grads))


def _missing(norm: Any, name: str, like: Tensor) -> Tensor:
    """Return ones or zeros in the place of a weight or bias that the norm does not have."""
    make = torch.ones if name == "weight" and not norm.zero_centered_gamma else torch.zeros
    return make(norm.normalized_shape, dtype=like.dtype, device=like.device)


def reason_to_keep(norm: nn.Module) -> str | None:
    """Return the reason why a norm is kept, or None if the norm converts; ``NO_NORM`` for another module."""
    if isinstance(norm, _Norm):
        return None
    if type(norm) is nn.LayerNorm or type(norm) is nn.RMSNorm:
        if len(norm.normalized_shape) > 1:
            return f"normalises {len(norm.normalized_shape)} dimensions"
        if type(norm) is nn.RMSNorm and norm.eps is None:
            return "eps=None, which depends on the input's dtype"
        features = norm.normalized_shape[0]
    elif "RMSNorm" in type(norm).__name__:
        if norm_formula(norm) is None:
            return f"{type(norm).__name__} computes something else than an RMSNorm"
        features = norm._parameters["weight"].numel()  # type: ignore[union-attr]
    elif isinstance(norm, nn.LayerNorm):
        return f"a subclass of LayerNorm ({type(norm).__name__})"
    else:
        return NO_NORM
    if "forward" in norm.__dict__:
        return "its forward is replaced on the instance"
    return f"features are no multiple of {FEATURE_ALIGNMENT}" if features % FEATURE_ALIGNMENT else None


@torch.no_grad()
def norm_formula(norm: nn.Module) -> Formula | None:
    """Return the factor with which an RMSNorm multiplies, found by a run on a small input; None if it is no RMSNorm."""
    weight, epsilon = norm._parameters.get("weight"), _epsilon(norm)
    others = [*norm.children(), *norm.buffers(), *(p for p in norm.parameters() if p is not weight)]
    if weight is None or weight.dim() != 1 or epsilon is None or others:
        return None
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        gamma = torch.randn(weight.numel(), generator=generator)
        x = torch.randn(3, weight.numel(), generator=generator)
        probe = object.__new__(type(norm))
        # a large eps shows its place in the formula
        vars(probe).update(vars(norm) | {"_parameters": {"weight": nn.Parameter(gamma)}, epsilon: 0.5})
        try:
            output = type(norm).forward(probe, x)  # without hooks
        except Exception:  # an RMSNorm of one input does not raise
            return None
    normed = x * (x.square().mean(-1, keepdim=True) + 0.5).rsqrt()
    if not isinstance(output, Tensor) or output.shape != x.shape:
        return None
    if torch.allclose(output.float(), normed * gamma, rtol=1e-4, atol=1e-4):
        return "weight"
    return "1 + weight" if torch.allclose(output.float(), normed * (1 + gamma), rtol=1e-4, atol=1e-4) else None


def _epsilon(norm: nn.Module) -> str | None:
    return next((name for name in EPSILONS if isinstance(vars(norm).get(name), float)), None)


def convert_norms(model: nn.Module, fqns: Collection[str]) -> None:
    """Make the norms named by ``fqns`` Transformer Engine's, and give all other norms their own class back."""
    for fqn, module in list(model.named_modules()):
        if fqn in fqns and not isinstance(module, _Norm):
            _convert(module)
        elif fqn not in fqns and isinstance(module, _Norm):
            revert(module)


def _convert(norm: Any) -> None:
    if type(norm) is nn.LayerNorm:
        become(norm, TELayerNorm, vars(te.LayerNorm(norm.normalized_shape, eps=norm.eps, device="meta")))
        return
    shape = norm.normalized_shape if norm.weight is None else norm.weight.shape
    centred = type(norm) is not nn.RMSNorm and norm_formula(norm) == "1 + weight"
    made = te.RMSNorm(shape, eps=getattr(norm, str(_epsilon(norm))), zero_centered_gamma=centred, device="meta")
    become(norm, TERMSNorm, vars(made))
