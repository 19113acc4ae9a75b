"""Compute the stacked experts of a mixture by grouped products, in a dtype that a precision chooses.

transformers stacks the experts of a layer in two Parameters of three dimensions, and multiplies them by
``torch.nn.functional.grouped_mm``. Autocast does not know this operation: the products run in the dtype of the weights,
float32 under every mixed precision. So a precision takes over the forward of the experts. Everything between the two
products (gate, activation, biases, a norm) stays the model's own.

    hidden states, experts of each token --spread--> rows, sorted --product--> gate --product--> --collect--> their sum

``GroupedExperts`` of torchtitan take tokens that are sorted by expert already, and have three Parameters:

    tokens [M, D], counts [E]  -->  silu(tokens @ w1.T) * (tokens @ w3.T) @ w2.T,  w1 and w3 [E, H, D], w2 [E, D, H]

Other projects have classes of this name with other layouts, activations or limits. So names and shapes are not enough:
the module's own code computes a small example, on CPU, with small weights in place of its own.

The class of the module changes in place (:mod:`~lightning_lowprec.conversion.in_place`), not the setting
``experts_implementation``, which lies in a config object that models share. The other settings of transformers are left
alone: "eager" and "batched_mm" run operations that autocast knows.
"""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.in_place import RoleModule, own_class
from lightning_lowprec.numerics.groups import Groups, collect, group, group_sorted, per_row, spread
from lightning_lowprec.private.transformers import (
    activate,
    experts_implementation,
    is_expert_parallel,
    own_implementation,
    redirect,
    undo_redirect,
)

_FLAGS = frozenset({"has_gate", "has_bias", "is_transposed", "is_concatenated"})
"""What ``use_experts_implementation`` of transformers (5.0 and later) sets on a module."""
_BYTES = 16  # the rows of both operands of a grouped product begin at multiples of this
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


def is_stack(module: nn.Module) -> bool:
    """Return whether a module looks like stacked experts, of transformers or torchtitan, that a role can compute."""
    return is_sorted_stack(module) or _is_of_transformers(module)


def _is_of_transformers(module: nn.Module) -> bool:
    """Return whether transformers would run the module as grouped products (its ``use_experts_implementation``)."""
    return vars(module).keys() >= _FLAGS and module._parameters.keys() >= set(_routed_names(module))


def weight_names(experts: nn.Module) -> tuple[str, ...]:
    """Return the names of the stacked Parameters of a module that :func:`is_stack` accepts."""
    return _routed_names(experts) if _is_of_transformers(experts) else NAMES


def _routed_names(experts: nn.Module) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the stacked experts of a model by fqn."""
    return ((fqn, module) for fqn, module in model.named_modules() if is_stack(module))


class RoutedExperts(RoleModule):
    """Stacked experts whose products a precision computes."""

    alignment: int = 1
    """The rows of each expert begin at a multiple of this."""
    has_gate: bool
    has_bias: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    @abstractmethod
    def takes(self, hidden_states: Tensor) -> bool:
        """Return whether the precision computes this call; otherwise the model's own code does."""

    @abstractmethod
    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """Multiply the rows of each expert by its matrix of the Parameter ``name``: [P, K] -> [P, N]."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute what the module's own forward computes; the arguments are the same."""
        experts: Any = self
        if not issubclass(type(experts), RoutedExperts):  # expert parallelism kept this function, and the role is gone
            output: Tensor = type(experts).forward(experts, *args, **kwargs)
            return output
        tokens: Any = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        if tokens.numel() == 0 or not self.takes(tokens):
            with own_implementation(self):
                output = super().forward(*args, **kwargs)
            return output
        return self._sorted(*args, **kwargs) if NAMES[0] in self._parameters else self._routed(*args, **kwargs)

    def _sorted(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """[M, K], [E] -> [M, K], dtype of ``x``; zero behind the tokens of the last expert."""
        count = self.weight(NAMES[0]).shape[0]
        if num_tokens_per_expert.shape != (count,):
            raise ValueError(
                f"`num_tokens_per_expert` has the shape {tuple(num_tokens_per_expert.shape)}, and this rank has {count}"
                f" experts; expected ({count},)."
            )
        groups = group_sorted(num_tokens_per_expert.long(), x.shape[0], self.alignment)
        rows = spread(x.to(compute_dtype(x)), groups)
        gate, up = (self.multiply(rows, name, groups) for name in NAMES[:2])
        return collect(self.multiply(F.silu(gate) * up, NAMES[2], groups), groups).to(x.dtype)

    def _routed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K], [T, k], [T, k] -> [T, K], dtype of ``hidden_states``."""
        first, second = _routed_names(self)
        weight = self.weight(first)
        absent = is_expert_parallel(self) or weight is not getattr(self, first)
        groups = group(top_k_index, weight.shape[0], self.alignment, some_absent=absent)
        rows = spread(hidden_states.to(compute_dtype(hidden_states)), groups)
        inner = self._product(rows, first, groups)
        inner = activate(self, inner) if self.has_gate else self.act_fn(inner)
        pairs = collect(self._product(inner, second, groups), groups)
        if getattr(self, "has_post_expert_norm", False):
            pairs = self.post_expert_norm(pairs)
        weighted = pairs * top_k_weights.reshape(-1, 1)
        return weighted.view(*top_k_index.shape, -1).sum(dim=1).to(hidden_states.dtype)

    def _product(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        product = self.multiply(rows, name, groups)
        if not self.has_bias:
            return product
        return product + per_row(self.weight(f"{name}_bias").to(product.dtype), groups)

    def weight(self, name: str) -> Tensor:
        """Return a Parameter: [E, ...], the experts of this rank."""
        parameter: Tensor = getattr(self, name)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def take_experts(experts: nn.Module, role: type[RoutedExperts], attributes: Mapping[str, object]) -> None:
    """Give stacked experts a role in place, also where expert parallelism has replaced their forward."""
    in_place.become(experts, in_place.derived(role, type(experts)), attributes)
    redirect(experts)


def release_experts(experts: RoutedExperts) -> None:
    """Undo :func:`take_experts`."""
    undo_redirect(experts)
    in_place.revert(experts)


def cut_by_expert(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the Parameters of stacked experts that are DTensors, and of which each rank has whole experts."""
    for _, module in stacks(model):
        for parameter in () if isinstance(module, FSDPModule) else module.parameters(recurse=False):
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if placements and all(type(p) is Replicate or p == Shard(0) for p in placements):
                yield parameter


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast multiplies ``x``; without autocast the dtype of ``x``."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def grouped_product(rows: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """[P, K], [E, K, N] -> [P, N], in the dtype of ``rows``; rows of no expert are without meaning."""
    step = _BYTES // rows.element_size()
    (inner, outer), weight = weight.shape[1:], weight.to(rows.dtype)
    if inner % step or outer % step:
        rows = F.pad(rows, (0, -inner % step))
        weight = F.pad(weight, (0, -outer % step, 0, -inner % step))
    product: Tensor = F.grouped_mm(rows, weight, offs=groups.ends)
    return product[:, :outer]


def matrices(experts: RoutedExperts, name: str) -> Tensor:
    """Return a stacked Parameter as [E, K, N], for ``rows @ matrix``."""
    weight = experts.weight(name)
    return weight if is_transposed(experts) else weight.mT


def is_transposed(experts: nn.Module) -> bool:
    """Return whether the stacked Parameters are [E, K, N] instead of [E, N, K]."""
    return bool(getattr(experts, "is_transposed", False))


@final
class CastExperts(RoutedExperts):
    """Stacked experts whose products run in the dtype of autocast."""

    def takes(self, hidden_states: Tensor) -> bool:
        """Whether autocast is on, and the model would multiply in the dtype of its weights."""
        on = torch.is_autocast_enabled(hidden_states.device.type)
        return on and (NAMES[0] in self._parameters or experts_implementation(self) == "grouped_mm")

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """[P, K] -> [P, N]."""
        return grouped_product(rows, matrices(self, name), groups)


def follow_autocast(model: nn.Module) -> None:
    """Let the stacked experts of ``model`` multiply in the dtype of autocast, except those that a backend computes."""
    for _, module in stacks(model):
        if not isinstance(module, RoleModule) and not (is_sorted_stack(module) and difference(module)):
            take_experts(module, CastExperts, {})


def stop_following_autocast(model: nn.Module) -> None:
    """Undo :func:`follow_autocast`, in place."""
    for module in model.modules():
        if isinstance(module, CastExperts):
            release_experts(module)


# ---- experts of torchtitan


def is_sorted_stack(module: nn.Module) -> bool:
    """Return whether the class has the name, the Parameters and the arguments of torchtitan's experts."""
    cls = own_class(module)
    weights = {name: p for name, p in module._parameters.items() if p is not None}
    if cls.__name__ != CLASS or weights.keys() != set(NAMES) or any(p.dim() != 3 for p in weights.values()):
        return False
    gate, up, down = (tuple(weights[name].shape) for name in NAMES)
    return gate == up == (down[0], down[2], down[1]) and list(inspect.signature(cls.forward).parameters) == _ARGUMENTS


def difference(module: nn.Module) -> str | None:
    """Return why a module that :func:`is_sorted_stack` accepts computes something else, or None if it does not."""
    if "forward" in vars(module):
        return "its forward is replaced on the instance"
    # Without: a class of another library with this name and these Parameters trains as w2(silu(w1 x) * w3 x), whatever
    # it computes. It can go when the experts have one importable class, or say their activation as transformers' do.
    generator = torch.Generator().manual_seed(0)  # not the user's

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    sizes = {"w1": (_HIDDEN, _WIDTH), "w3": (_HIDDEN, _WIDTH), "w2": (_WIDTH, _HIDDEN)}
    weights = {name: random(len(_COUNTS), *size) / math.sqrt(size[1]) for name, size in sizes.items()}
    for magnitude in _MAGNITUDES:
        tokens = magnitude * random(sum(_COUNTS), _WIDTH)
        try:
            result = _own_result(module, weights, tokens)
        except Exception as error:  # whatever the code of another library raises, it cannot be compared
            return f"{CLASS}, whose forward fails for a small example ({type(error).__name__})"
        parts = zip(torch.split(tokens, list(_COUNTS)), *(weights[name] for name in NAMES), strict=True)
        expected = torch.cat([(F.silu(x @ gate.T) * (x @ up.T)) @ down.T for x, gate, up, down in parts])
        if result.shape != expected.shape or not (result - expected).norm() <= _TOLERANCE * expected.norm():
            return f"{CLASS} that do not compute w2(silu(w1 x) * w3 x)"
    return None


def _own_result(module: nn.Module, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    cls = own_class(module)
    probe = cls.__new__(cls)
    vars(probe).update(vars(module))
    vars(probe)["_parameters"] = {name: nn.Parameter(weight) for name, weight in weights.items()}
    if "num_experts" in vars(probe):
        vars(probe)["num_experts"] = len(_COUNTS)
    if vars(probe).get(_GROUPED):
        vars(probe)[_GROUPED] = False
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        result: Tensor = cls.forward(probe, tokens.clone(), torch.tensor(_COUNTS, device="cpu"))
    return result.float()
