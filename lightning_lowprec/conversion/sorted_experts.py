"""Recognise experts that take tokens which are sorted by expert already: ``GroupedExperts`` of torchtitan.

    tokens [M, D], counts [E]  -->  silu(tokens @ w1.T) * (tokens @ w3.T) @ w2.T,  w1 and w3 [E, H, D], w2 [E, D, H]

Other projects have classes of this name with other layouts, activations or limits. So names and shapes are not enough:
the module's own code computes a small example, on CPU, with small weights in place of its own.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASS: Final = "GroupedExperts"
NAMES: Final = ("w1", "w3", "w2")
"""The Parameters: gate, up, down."""
_ARGUMENTS: Final = ["self", "x", "num_tokens_per_expert"]
_COUNTS: Final = (3, 5)
_WIDTH, _HIDDEN = 16, 32  # of the example; grouped products take rows of multiples of 16 bytes
_MAGNITUDES: Final = (1.0, 16.0)  # of the gate: the bend of an activation, and limits such as gpt-oss's 7
_TOLERANCE: Final = 0.01  # of the norm: the module may compute in bfloat16, whose products err by 0.004
_GROUPED: Final = "use_grouped_mm"
"""torchtitan's flag. Its grouped products run on CUDA alone; without the flag a loop computes the same."""


def is_sorted_stack(module: nn.Module) -> bool:
    """Return whether the class has the name, the Parameters and the arguments of torchtitan's experts."""
    own, found = _own_class(module), {name: p for name, p in module._parameters.items() if p is not None}
    if own.__name__ != CLASS or found.keys() != set(NAMES) or any(p.dim() != 3 for p in found.values()):
        return False
    gate, up, down = (tuple(found[name].shape) for name in NAMES)
    return gate == up == (down[0], down[2], down[1]) and list(inspect.signature(own.forward).parameters) == _ARGUMENTS


def difference(module: nn.Module) -> str | None:
    """Return why a module that :func:`is_sorted_stack` accepts computes something else, or None if it does not."""
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    for magnitude in _MAGNITUDES:
        weights, tokens = _example(magnitude)
        try:
            got = _own_result(module, weights, tokens)
        except Exception as error:  # whatever the code of another library raises, it cannot be compared
            return f"{CLASS}, whose forward fails for a small example ({type(error).__name__})"
        expected = _expected(weights, tokens)
        if got.shape != expected.shape or not (got - expected).norm() <= _TOLERANCE * expected.norm():
            return f"{CLASS} that do not compute w2(silu(w1 x) * w3 x)"
    return None


def _own_class(module: nn.Module) -> Any:
    return vars(module).get("own_class", type(module))


def _example(magnitude: float) -> tuple[dict[str, Tensor], Tensor]:
    """Return weights of mean square 1 / K, and tokens [M, D] of the given mean; no random number is drawn."""
    sizes = {"w1": (_HIDDEN, _WIDTH), "w3": (_HIDDEN, _WIDTH), "w2": (_WIDTH, _HIDDEN)}
    weights = {}
    for place, (name, (rows, columns)) in enumerate(sizes.items()):
        weights[name] = _values(len(_COUNTS) * rows, columns, place).view(-1, rows, columns) / math.sqrt(columns)
    return weights, magnitude * _values(sum(_COUNTS), _WIDTH, len(sizes))


def _values(rows: int, columns: int, place: int) -> Tensor:
    index = torch.arange(rows * columns, dtype=torch.float64, device="cpu") + 10_000 * place
    return (math.sqrt(2) * torch.sin(1.7 * index + 0.3 * torch.sin(index))).float().view(rows, columns)


def _own_result(module: nn.Module, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    own = _own_class(module)
    probe = own.__new__(own)
    vars(probe).update(vars(module))
    vars(probe)["_parameters"] = {name: nn.Parameter(weight) for name, weight in weights.items()}
    if "num_experts" in vars(probe):
        vars(probe)["num_experts"] = len(_COUNTS)
    if vars(probe).get(_GROUPED):
        vars(probe)[_GROUPED] = False
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result: Tensor = own.forward(probe, tokens.clone(), torch.tensor(_COUNTS, device="cpu"))
    return result.float()


def _expected(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    rows = tokens.tensor_split(torch.tensor(_COUNTS, device="cpu").cumsum(0)[:-1])
    parts = zip(rows, *(weights[name] for name in NAMES), strict=True)
    return torch.cat([(F.silu(x @ gate.T) * (x @ up.T)) @ down.T for x, gate, up, down in parts])
