"""Compute the experts of a mixture by two grouped GEMMs of Transformer Engine.

transformers stacks the experts of a layer in two Parameters, which stay; the engines borrow views of them, one per
expert. The router is not touched and stays in high precision. So does the activation between the GEMMs, which is the
model's own.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor

from lightning_lowprec.private.transformers import activate, check_experts
from lightning_lowprec.te.fusion.modules import UNIT, FusedModule
from lightning_lowprec.te.fusion.routing import mix_experts
from lightning_lowprec.te.fusion.units import GroupedEngine, Options, build, outside_of_graphs


@final
class ExpertsUnit:
    """Computes the experts of one mixture: ``gate_up_proj`` is [E, 2I, K], and ``down_proj`` [E, K, I]."""

    def __init__(self, experts: Any, options: Options) -> None:
        check_experts(experts)
        self.options = options
        (count, doubled, width), inner = experts.gate_up_proj.shape, experts.down_proj.shape[-1]
        dtype = experts.gate_up_proj.dtype
        self.up = build(GroupedEngine, experts, count, width, doubled, bias=False, params_dtype=dtype)
        self.down = build(GroupedEngine, experts, count, inner, width, bias=False, params_dtype=dtype)
        self.engines = {".up": self.up, ".down": self.down}

    @outside_of_graphs
    def __call__(self, experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K], [T, k], [T, k] -> [T, K], dtype of ``hidden_states``."""

        def grouped(engine: Any, stacked: Tensor, rows: Tensor, splits: list[int]) -> Tensor:
            weights = {f"weight{i}": weight for i, weight in enumerate(stacked.unbind())}
            output: Tensor = engine.compute(weights, rows, splits)
            return output

        def expert(rows: Tensor, splits: list[int]) -> Tensor:
            with self.options.precision(self.up, experts.training):
                doubled = grouped(self.up, experts.gate_up_proj, rows, splits)
                return grouped(self.down, experts.down_proj, activate(experts, doubled), splits)

        sizes = {"num_experts": self.up.num_gemms, "alignment": self.options.expert_alignment}
        return mix_experts(hidden_states, top_k_index, top_k_weights, **sizes, expert=expert)


@final
class FusedExperts(FusedModule):
    """Stacked experts of transformers that compute by grouped GEMMs."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, K], [T, k], [T, k] -> [T, K]."""
        output: Tensor = self.__dict__[UNIT](self, hidden_states, top_k_index, top_k_weights)
        return output
