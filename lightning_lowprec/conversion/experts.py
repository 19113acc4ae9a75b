"""Compute the stacked experts of a mixture by grouped products, in a dtype that a precision chooses.

transformers stacks the experts of a layer in two Parameters of three dimensions, and multiplies them by
``torch.nn.functional.grouped_mm``. Autocast does not know this operation: the products run in the dtype of the weights,
float32 under every mixed precision. So a precision takes over the forward of the experts. Everything between the two
products (gate, activation, biases, a norm) stays the model's own.

    hidden states, experts of each token --spread--> rows, sorted --product--> gate --product--> --collect--> their sum

The class of the module changes in place (:mod:`~lightning_lowprec.conversion.in_place`), not the setting
``experts_implementation``, which lies in a config object that models share. The other settings of transformers are left
alone: "eager" and "batched_mm" run operations that autocast knows.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.in_place import RoleModule
from lightning_lowprec.numerics.groups import Groups, collect, group, per_row, spread
from lightning_lowprec.private import transformers

_FLAGS = frozenset({"has_gate", "has_bias", "is_transposed", "is_concatenated"})
"""What ``use_experts_implementation`` of transformers (5.0 and later) sets on a module."""
_BYTES = 16  # the rows of both operands of a grouped product begin at multiples of this


def is_stack(module: nn.Module) -> bool:
    """Return whether transformers would run the module as grouped products (its ``use_experts_implementation``)."""
    return vars(module).keys() >= _FLAGS and module._parameters.keys() >= set(weight_names(module))


def weight_names(experts: nn.Module) -> tuple[str, str]:
    """Return the names of the two stacked Parameters of a module that :func:`is_stack` accepts."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the stacked experts of a model by fqn."""
    return ((fqn, module) for fqn, module in model.named_modules() if is_stack(module))


class RoutedExperts(RoleModule):
    """Stacked experts whose two products a precision computes."""

    alignment: int = 1
    """The rows of each expert begin at a multiple of this."""
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    """Whether the Parameters are [E, K, N] instead of [E, N, K]."""
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    @abstractmethod
    def takes(self, hidden_states: Tensor) -> bool:
        """Return whether the precision computes this call; otherwise the model's own code does."""

    @abstractmethod
    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """Multiply the rows of each expert by its matrix of the Parameter ``name``: [P, K] -> [P, N]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K], [T, k], [T, k] -> [T, K], dtype of ``hidden_states``."""
        experts: Any = self
        if not issubclass(type(experts), RoutedExperts):  # expert parallelism kept this function, and the role is gone
            output: Tensor = type(experts).forward(experts, hidden_states, top_k_index, top_k_weights)
            return output
        if hidden_states.numel() == 0 or not self.takes(hidden_states):
            with transformers.own_implementation(self):
                output = super().forward(hidden_states, top_k_index, top_k_weights)
            return output
        first, second = weight_names(self)
        weight = self.weight(first)
        absent = transformers.is_expert_parallel(self) or weight is not getattr(self, first)
        groups = group(top_k_index, weight.shape[0], self.alignment, some_absent=absent)
        device = hidden_states.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        rows = spread(hidden_states.to(autocast or hidden_states.dtype), groups)
        inner = self._product(rows, first, groups)
        inner = transformers.activate(self, inner) if self.has_gate else self.act_fn(inner)
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
    transformers.redirect(experts)


def release_experts(experts: RoutedExperts) -> None:
    """Undo :func:`take_experts`."""
    transformers.undo_redirect(experts)
    in_place.revert(experts)


def cut_by_expert(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the Parameters of stacked experts that are DTensors, and of which each rank has whole experts."""
    for _, module in stacks(model):
        for parameter in () if isinstance(module, FSDPModule) else module.parameters(recurse=False):
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            if placements and all(type(p) is Replicate or p == Shard(0) for p in placements):
                yield parameter


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
    return weight if experts.is_transposed else weight.mT


@final
class CastExperts(RoutedExperts):
    """Stacked experts whose products run in the dtype of autocast."""

    def takes(self, hidden_states: Tensor) -> bool:
        """Whether autocast is on, and the model would multiply in the dtype of its weights."""
        on = torch.is_autocast_enabled(hidden_states.device.type)
        return on and transformers.experts_implementation(self) == "grouped_mm"

    def multiply(self, rows: Tensor, name: str, groups: Groups) -> Tensor:
        """[P, K] -> [P, N]."""
        return grouped_product(rows, matrices(self, name), groups)


def follow_autocast(model: nn.Module) -> None:
    """Let the stacked experts of ``model`` multiply in the dtype of autocast, except those that a backend computes."""
    for _, module in stacks(model):
        if not isinstance(module, RoleModule):
            take_experts(module, CastExperts, {})


def stop_following_autocast(model: nn.Module) -> None:
    """Undo :func:`follow_autocast`, in place."""
    for module in model.modules():
        if isinstance(module, CastExperts):
            release_experts(module)
