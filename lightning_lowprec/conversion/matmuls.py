"""Find every weight that is multiplied with the tokens: Linears, and other layers that do the work of a Linear."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, cast

from torch import Tensor, nn

from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.private import transformers
from lightning_lowprec.private.deepspeed import whole_shape

STACKED: Final = "stacked experts"
"""The kind of a Parameter of three dimensions that holds one matrix per expert."""
CONV1D: Final = "Conv1D"
"""The kind of the weight of GPT-2's layer, [in, out]."""

_CONVOLUTIONS: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_IN_PROJ: Final = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""The weights that ``nn.MultiheadAttention`` multiplies its inputs with."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """One weight and its shape as ``[tokens, in_features] @ [in_features, out_features]``."""

    fqn: str
    """The name of the weight's module, or of the parameter of stacked experts; ``""`` if the model is a Linear."""
    kind: str
    """``"Linear"``, or the name of the layer that does a Linear's work."""
    in_features: int
    out_features: int
    per_token: float = 1.0
    """The number of products of this shape per token: 2 for a mixture that sends each token to 2 experts; 0 for a
    convolution, whose number of positions depends on the data."""
    stored: int = 1
    """The number of weights of this shape: the number of stacked experts."""

    @property
    def elements(self) -> int:
        """The number of elements of all weights."""
        return self.stored * self.in_features * self.out_features

    @property
    def parts(self) -> int:
        """The size of the first dimension, which FSDP2 cuts."""
        if self.kind == STACKED:
            return self.stored
        return self.in_features if self.kind == CONV1D else self.out_features


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' ``Conv1D`` (GPT-2), subclasses too: a Linear whose weight is [K, N]."""
    return any(transformers.is_conv1d(cls) for cls in type(module).__mro__)


def sizes_of_conv1d(module: nn.Module) -> dict[str, int]:
    """Return the sizes of a ``Conv1D`` as a Linear calls them."""
    rows, columns = whole_shape(cast(Tensor, module.weight))
    return {"in_features": rows, "out_features": columns}


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a Linear, subclasses too, or transformers' ``Conv1D``."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return Linears and Conv1Ds by fqn, subclasses too, in the order of ``named_modules``; a root's fqn is ``""``."""
    return {fqn: module for fqn, module in model.named_modules() if is_linear(module)}


def matmuls(model: nn.Module) -> list[tuple[Matmul, nn.Module]]:
    """Return every weight that is multiplied with the tokens, with its module, in the order of ``named_modules``."""
    return [(matmul, module) for fqn, module in model.named_modules() for matmul in _of(model, fqn, module)]


def other_products(model: nn.Module) -> Iterator[tuple[Matmul, nn.Module]]:
    """Yield the weights of convolutions, recurrent layers and ``nn.MultiheadAttention.in_proj``, with their modules."""
    for fqn, module in model.named_modules():
        for name, p in module._parameters.items():
            kind = _other_kind(module, name)
            if p is None or kind is None:
                continue
            rows, *columns = whole_shape(p)
            matmul = Matmul(
                fqn=f"{fqn}.{name}".lstrip("."),
                kind=kind,
                in_features=math.prod(columns),
                out_features=rows,
                per_token=0.0 if isinstance(module, _CONVOLUTIONS) else 1.0,
            )
            yield matmul, module


def _other_kind(module: nn.Module, name: str) -> str | None:
    kind = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return f"in_proj of a {kind}" if name in _IN_PROJ else None
    is_convolution = isinstance(module, _CONVOLUTIONS) and name == "weight"
    is_recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase) and name.startswith("weight_")
    return kind if is_convolution or is_recurrent else None


def _of(model: nn.Module, fqn: str, module: nn.Module) -> list[Matmul]:
    name = type(module).__name__
    if isinstance(module, nn.Linear):
        return [Matmul(fqn=fqn, kind="Linear", in_features=module.in_features, out_features=module.out_features)]
    if is_conv1d(module):
        return [Matmul(fqn=fqn, kind=CONV1D, **sizes_of_conv1d(module))]
    weight = dict(module._parameters.items()).get("weight")  # torch.jit.script's modules have items alone
    shape = () if weight is None else whole_shape(weight)
    if len(shape) == 2 and name == "Conv1D":  # another copy of GPT-2's: weight is [in, out]
        return [Matmul(fqn=fqn, kind=CONV1D, in_features=shape[0], out_features=shape[1])]
    if len(shape) == 2 and name.endswith("Router"):
        return [Matmul(fqn=fqn, kind="router", in_features=shape[1], out_features=shape[0])]
    if "expert" not in fqn.rpartition(".")[2].lower() and not is_stack(module):
        return []
    first, second = (1, 2) if getattr(module, "is_transposed", False) else (2, 1)
    parent = model.get_submodule(fqn.rpartition(".")[0])
    choices = (getattr(m, "top_k", None) for m in (parent, *parent.children()))
    top_k = next((value for value in choices if isinstance(value, int)), None)
    return [
        Matmul(
            fqn=f"{fqn}.{parameter}",
            kind=STACKED,
            in_features=sizes[first],
            out_features=sizes[second],
            per_token=float(top_k or sizes[0]),
            stored=sizes[0],
        )
        for parameter, p in module._parameters.items()
        if p is not None and len(sizes := whole_shape(p)) == 3
    ]


# ---- the gain of FP8 over bf16, forward and backward, by torchao's published figures for one H100

Published = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
SOURCE: Final = "torchao's published H100 figures"
"""The origin of the figures, for log lines."""
PUBLISHED: Final = {(1024, 8192): 1.43, (8192, 7168): 1.73, (3584, 8192): 1.71}
"""(in_features, out_features), at 16,384 tokens -> how many times faster than bf16; tensorwise."""


def expected_gain(recipe: str | None, in_features: int, out_features: int) -> float | None:
    """Return the gain of the nearest published shape (in log space); None below the published break-even.

    A recipe without figures counts as tensorwise. The gain orders layers; it does not predict the time of a step.
    """
    k, n = in_features, out_features
    by_row = recipe in ("rowwise", "rowwise_with_gw_hp")
    slower = n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048) if by_row else k <= 4096 and n <= 1024
    if slower:
        return None
    place = [math.log2(max(size, 1)) for size in (k, n)]
    return PUBLISHED[min(PUBLISHED, key=lambda shape: math.dist([math.log2(size) for size in shape], place))]
