"""Make LayerNorms and RMSNorms Transformer Engine's, in place.

The kernels of Transformer Engine compute in float32 inside. Under autocast they round input, weight and output to the
autocast dtype, where torch's LayerNorm returns float32.
"""

from collections.abc import Collection
from typing import Any, Final, final

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import Tensor, nn

from lightning_lowprec.conversion.declared import PlainFirst
from lightning_lowprec.conversion.in_place import become, revert
from lightning_lowprec.conversion.selection import FEATURE_ALIGNMENT
from lightning_lowprec.products.transforms import without_second_gradient
from lightning_lowprec.te.layer import check_input

NO_NORM: Final = "no norm"
"""The answer of :func:`reason_to_keep` for a module that is no norm."""
_GEMMA: Final = ("gemma", "gemma2", "gemma3")
"""Their norms multiply by ``1 + weight``."""
_OF_TRANSFORMERS: Final = {
    (f"transformers.models.{model}.modeling_{model}", f"{model.title()}RMSNorm"): model in _GEMMA
    for model in ("llama", "mistral", "mixtral", "qwen2", "qwen3", *_GEMMA)
}


class _Norm(PlainFirst):
    """The common part of both norms: no extra state in the state dict."""

    weight: Any
    bias: Any
    eps: float
    centred: bool
    """Whether the factor is ``1 + weight``."""

    def forward(self, input: Tensor) -> Tensor:
        """[*, K] -> [*, K] in the autocast dtype, or in that of the weight."""
        check_input(input)
        wrong = input.numel() == 0 or input.shape[-1:] != self.weight.shape  # torch's error names the shapes
        if wrong or torch.compiler.is_compiling():
            return self._by_torch(input)
        output: Tensor = super().forward(input)
        return without_second_gradient(output)

    def _by_torch(self, input: Tensor) -> Tensor:
        """Compute the same formula by torch: a compiler makes one kernel of the norm and of what is around it.

        A compiled block of the 8B shape moves 12.04 GB (counted), with Transformer Engine's modules 12.96. With the
        module's own forward, which returns float32 under autocast, the step keeps 2.1 GB more.
        """
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.weight.dtype
        x, weight = input.to(dtype), self.weight.to(dtype)
        if self.centred:
            x, weight = x.float(), 1 + weight.float()
        with torch.autocast("cuda", enabled=False):
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
        if _key(norm) not in _OF_TRANSFORMERS:
            return f"{type(norm).__name__} is no RMSNorm of torch, Llama or Gemma"
    elif isinstance(norm, nn.LayerNorm):
        return f"a subclass of LayerNorm ({type(norm).__name__})"
    else:
        return NO_NORM
    if "forward" in norm.__dict__:
        return "its forward is replaced on the instance"
    weight: Any = norm.weight
    return f"features are no multiple of {FEATURE_ALIGNMENT}" if weight.numel() % FEATURE_ALIGNMENT else None


def _key(norm: nn.Module) -> tuple[str, str]:
    return type(norm).__module__, type(norm).__qualname__


def convert_norms(model: nn.Module, fqns: Collection[str]) -> None:
    """Make the norms named by ``fqns`` Transformer Engine's, and give all other norms their own class back."""
    for fqn, module in list(model.named_modules()):
        if fqn in fqns and not isinstance(module, _Norm):
            _convert(module)
        elif fqn not in fqns and isinstance(module, _Norm):
            revert(module)


def _convert(norm: Any) -> None:
    epsilon, centred = getattr(norm, "variance_epsilon", None), _OF_TRANSFORMERS.get(_key(norm), False)
    options = {"eps": norm.eps if epsilon is None else epsilon, "zero_centered_gamma": centred, "device": "meta"}
    ours, theirs = (TELayerNorm, te.LayerNorm) if type(norm) is nn.LayerNorm else (TERMSNorm, te.RMSNorm)
    become(norm, ours, {**vars(theirs(norm.weight.shape, **options)), "centred": centred})
