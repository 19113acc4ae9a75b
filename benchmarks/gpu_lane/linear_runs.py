"""One bias-free Linear, forward and backward, by everyone: what the linear table times.

    output      = input       @ weight.T        # [M, K] @ [K, N] -> [M, N]
    grad_input  = grad_output @ weight          # [M, N] @ [N, K] -> [M, K]
    grad_weight = grad_output.T @ input         # [N, M] @ [M, K] -> [N, K]

Weights are bf16, as in torchao's and Transformer Engine's published tables. Columns with ``FLOAT32`` in their names
have float32 weights under autocast, as the training steps have: they cast the weight once or twice and return its
gradient in float32, which is what a bound on such a step must count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.gpu_lane.contenders import cpu_refusal
from benchmarks.gpu_lane.item import missing_library
from benchmarks.gpu_lane.setups import te_recipe

Run = Callable[[], None]
BF16, LIMIT = "bf16", "fp8 GEMMs alone"
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
TE = ("delayed", "current", "block")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One shape and the tensors that all contenders share."""

    m: int
    k: int
    n: int
    device: torch.device
    compile: bool

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Input (M, K) that wants a gradient, and grad_output (M, N); random, never zeros."""
        torch.manual_seed(0)
        x = torch.randn(self.m, self.k, device=self.device, dtype=torch.bfloat16, requires_grad=True)
        return x, torch.randn(self.m, self.n, device=self.device, dtype=torch.bfloat16)

    def plain(self, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
        return nn.Linear(self.k, self.n, bias=False, device=self.device, dtype=dtype)


FLOAT32 = ", float32 weights"
NAMES = (BF16, *(f"torchao {recipe}" for recipe in TORCHAO), *(f"te {recipe}" for recipe in TE), LIMIT)
"""The columns with bf16 weights."""
OF_STEPS = tuple(name + FLOAT32 for name in (BF16, "torchao tensorwise", "te delayed"))
"""The columns with float32 weights, at the shapes of the training steps: what ``fp8-hybrid`` may mean."""
FEWER = tuple(name for name in NAMES if name != "torchao rowwise_with_gw_hp")
"""The columns of a shape that is not among the most valuable: every compilation is paid with GPU time."""


def column(name: str, weights: str) -> str:
    """The column of a step with weights of this dtype (``"float32"``, ``"bfloat16"``)."""
    return name + FLOAT32 if weights == "float32" else name


def why_not(name: str, device: torch.device) -> str | None:
    """Why this contender is missing here, or None."""
    name = name.removesuffix(FLOAT32)
    if name.startswith("torchao "):
        return missing_library(("torchao.float8",)) or (cpu_refusal(name) if device.type == "cpu" else None)
    if name.startswith("te "):
        return missing_library(("transformer_engine.pytorch",)) or (
            None if device.type == "cuda" else "needs a CUDA GPU"
        )
    return None


def make(problem: Problem, name: str) -> Run:
    """A callable that runs forward and backward of this contender once."""
    dtype = torch.float32 if name.endswith(FLOAT32) else torch.bfloat16
    name = name.removesuffix(FLOAT32)
    backend, _, recipe = name.partition(" ")
    if backend == "torchao":
        return _torchao(problem, recipe, dtype)
    if backend == "te":
        return _te(problem, recipe, dtype)
    return _bf16(problem, dtype) if name == BF16 else _gemms(problem)


def _stepper(problem: Problem, layer: nn.Module, call: Callable[[Tensor], Tensor]) -> Run:
    x, grad = problem.tensors()
    autocast = any(p.dtype == torch.float32 for p in layer.parameters())

    def run() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None
        with torch.autocast(problem.device.type, torch.bfloat16, enabled=autocast):
            y = call(x)
        y.backward(grad)

    return run


def _bf16(problem: Problem, dtype: torch.dtype) -> Run:
    """Compiled with float32 weights, whose casts a step's blocks compile too; bf16 is the product alone."""
    layer = problem.plain(dtype)
    compiled = problem.compile and dtype == torch.float32
    return _stepper(problem, layer, torch.compile(layer, dynamic=False) if compiled else layer)


def _torchao(problem: Problem, recipe: str, dtype: torch.dtype) -> Run:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(nn.Sequential(problem.plain(dtype)), config=config)
    return _stepper(problem, model, torch.compile(model, dynamic=False) if problem.compile else model)


def _te(problem: Problem, recipe: str, dtype: torch.dtype) -> Run:
    import transformer_engine.pytorch as te

    layer = te.Linear(problem.k, problem.n, bias=False, params_dtype=dtype, device=problem.device)
    fp8 = te_recipe(recipe)

    def call(x: Tensor) -> Tensor:
        with te.autocast(enabled=True, recipe=fp8):
            out: Tensor = layer(x)
        return out

    return _stepper(problem, layer, call)


def _gemms(problem: Problem) -> Run:
    """The three GEMMs on operands that are FP8 already: what no recipe can beat at this shape."""
    x, grad = problem.tensors()
    weight = problem.plain().weight
    one = torch.ones((), device=problem.device)
    e4m3 = torch.float8_e4m3fn

    def columns(t: Tensor) -> Tensor:
        """The second operand of _scaled_mm is column-major."""
        return t.t().contiguous().t()

    with torch.no_grad():
        pairs = [
            (x.to(e4m3), weight.to(e4m3).t(), True),  # [M, K] @ [K, N]
            (grad.to(torch.float8_e5m2), columns(weight.to(e4m3)), False),  # [M, N] @ [N, K]
            (grad.to(torch.float8_e5m2).t().contiguous(), columns(x.to(e4m3)), False),  # [N, M] @ [M, K]
        ]

    def run() -> None:
        for a, b, fast in pairs:
            torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run
