"""Make LayerNorms and RMSNorms Transformer Engine's, in place.

The kernels of Transformer Engine compute in float32 inside. Under autocast they round input, weight and output to the
autocast dtype, where torch's LayerNorm returns float32.

An RMSNorm of another library is recognised by its results: a copy runs on a small input, and the output is compared
with the formulas of Llama (``weight``) and Gemma (``1 + weight``). A module that computes anything else is kept.
"""

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
from lightning_lowprec.products.transforms import without_second_gradient
from lightning_lowprec.te.layer import check_input

EPSILONS: Final = ("variance_epsilon", "eps", "epsilon")
"""The names of eps in the RMSNorms of transformers, torch and other libraries."""
NO_NORM: Final = "no norm"
"""The answer of :func:`reason_to_keep` for a module that is no norm."""
Formula = Literal["weight", "1 + weight"]


class _Norm(PlainFirst):
    """The common part of both norms: no extra state in the state dict."""

    weight: Any
    bias: Any
    eps: float
    zero_centered_gamma: bool

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, K] in the autocast dtype, or in that of the weight."""
        check_input(input)
        wrong = input.numel() == 0 or input.shape[-1:] != self.weight.shape  # torch's error names the shapes
        if wrong or torch.compiler.is_compiling() or is_in_onnx_export_mode():
            return self._by_torch(input)
        output: Tensor = super().forward(input)
        return without_second_gradient(output)

    def _by_torch(self, input: Tensor) -> Tensor:
        """Compute the same formula by torch: a compiler makes one kernel of the norm and of what is around it.

        A compiled block of the 8B shape launches 60 kernels and moves 12.04 GB (counted). With Transformer Engine's
        modules, which end graphs, it launches 73 and moves 12.96 GB.
        """
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.weight.dtype
        x, weight = input.to(dtype), self.weight.to(dtype)
        if self.zero_centered_gamma:
            x, weight = x.float(), 1 + weight.float()
        with torch.autocast("cuda", enabled=False):  # under autocast a LayerNorm returns float32
            if isinstance(self, nn.LayerNorm):
                return F.layer_norm(x, weight.shape, weight, self.bias.to(dtype), self.eps).to(dtype)
            return F.rms_norm(x, weight.shape, weight, self.eps).to(dtype)

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


def reason_to_keep(norm: nn.Module) -> str | None:
    """Return the reason why a norm is kept, or None if the norm converts; ``NO_NORM`` for another module."""
    if isinstance(norm, _Norm):
        return None
    if type(norm) is nn.LayerNorm or type(norm) is nn.RMSNorm:
        if len(norm.normalized_shape) > 1:
            return f"normalises {len(norm.normalized_shape)} dimensions"
        if missing := next((name for name, value in norm._parameters.items() if value is None), None):
            return f"has no {missing}, which Transformer Engine's kernels need"
        if type(norm) is nn.RMSNorm and norm.eps is None:
            return "eps=None, which depends on the input's dtype"
    elif "RMSNorm" in type(norm).__name__:
        if norm_formula(norm) is None:
            return f"{type(norm).__name__} computes something else than an RMSNorm"
    elif isinstance(norm, nn.LayerNorm):
        return f"a subclass of LayerNorm ({type(norm).__name__})"
    else:
        return NO_NORM
    if "forward" in norm.__dict__:
        return "its forward is replaced on the instance"
    weight: Any = norm.weight
    return f"features are no multiple of {FEATURE_ALIGNMENT}" if weight.numel() % FEATURE_ALIGNMENT else None


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
    centred = type(norm) is not nn.RMSNorm and norm_formula(norm) == "1 + weight"
    options = {"eps": getattr(norm, str(_epsilon(norm))), "zero_centered_gamma": centred}
    become(norm, TERMSNorm, vars(te.RMSNorm(norm.weight.shape, device="meta", **options)))
