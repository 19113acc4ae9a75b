"""The rates of this device that a roofline of the 8B-shaped step needs, each with a name.

A product is named ``gemm KIND M x N x K`` (written ``8192x14336x4096``): [M, K] @ [K, N] -> [M, N]. Operands lie as in
a step, on random data:

    forward   [tokens, in]  @ [in, out]      input and transposed weight       "gemm bf16 8192x14336x4096"
    dgrad     [tokens, out] @ [out, in]      gradient and weight               "gemm bf16 dgrad 8192x4096x14336"
    wgrad     [out, tokens] @ [tokens, in]   transposed gradient and input     "gemm bf16 wgrad 14336x4096x8192"

FP8 kinds: ``fp8 fast`` and ``fp8 exact`` (accumulation; backward is exact and has gradients in e5m2), ``fp8 rowwise
fast`` and ``fp8 rowwise exact`` (a scale per row and column, e4m3). A rate with ``sustained`` behind its name is that
of products without a pause for a while, when the limit of power counts. ``bandwidth copy`` reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_lane import measure, models
from benchmarks.gpu_lane.models import step_size
from benchmarks.gpu_lane.results import figures_of
from benchmarks.gpu_lane.settings import Settings
from benchmarks.gpu_lane.values import values_exist

Run = Callable[[], Any]
Rate = tuple[str, float, Run]
"""A name, the FLOPs or bytes of a run, and the run."""
COPY = "bandwidth copy"
SAMPLES, SUSTAINED_SECONDS = 10, 0.4
COPY_BYTES = 2**30
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def measured_rates(results_json: str | Path) -> dict[str, float]:
    """Return the rates in a ``results.json`` by name: FLOP/s of products and attention, bytes/s of copying.

    Empty if there are none.
    """
    return rates_of(json.loads(Path(results_json).read_text()))


def rates_of(data: dict[str, Any]) -> dict[str, float]:
    """Return the rates in results that were read already."""
    rates: dict[str, float] = figures_of(data, "linear").get("peaks", {}).get("rates", {})
    return rates


def rates(settings: Settings) -> dict[str, Any]:
    """Measure every rate; ``rates`` by name, ``rates_failed`` with the error of what did not run."""
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    for make in everyone(settings):
        try:
            name, amount, run = make()
        except Exception as error:  # operands that do not fit
            failed[getattr(make, "__name__", "?")] = measure.describe(error)
            continue
        try:
            found[name] = _rate(amount, run, settings)
            if name in sustained(settings):
                found[f"{name} sustained"] = _sustained(amount, run, settings)
        except Exception as error:
            failed[name] = measure.describe(error)
    return {"rates": found, "rates_failed": failed}


def sustained(settings: Settings) -> tuple[str, ...]:
    """Names of the products that are measured without a pause too: the largest of the forward."""
    shape, batch = step_size(settings)
    size = f"{batch * shape.sequence}x{shape.ffn}x{shape.hidden}"
    return tuple(f"gemm {kind} {size}" for kind in ("bf16", "fp8 fast", "fp8 exact"))


def everyone(settings: Settings) -> Iterator[Callable[[], Rate]]:
    """What makes the operands of each rate, one after the other: all of them at once would take much memory."""
    device = settings.torch_device
    shape, batch = step_size(settings)
    torch.manual_seed(0)
    for m, n, k in products(shape, batch * shape.sequence):
        for role, sizes in (("", (m, n, k)), ("dgrad ", (m, k, n)), ("wgrad ", (n, k, m))):
            yield lambda role=role, sizes=sizes: _bf16(role, *sizes, device)
            for kind in ("fast", "exact", "rowwise fast", "rowwise exact"):
                if not role or "exact" in kind:
                    yield lambda kind=kind, role=role, sizes=sizes: _fp8(kind, role, *sizes, device)
    yield lambda: _copy(device, 2**16 if settings.smoke else COPY_BYTES)
    for backward in (False, True):
        yield lambda backward=backward: _attention(shape, batch, device, backward=backward)


def products(shape: models.Shape, tokens: int) -> list[tuple[int, int, int]]:
    """(M, N, K) of the forwards of a block's linears; query and output are one, key and value another."""
    kv = shape.kv_heads * shape.head_dim
    dims = ((shape.ffn, shape.hidden), (shape.hidden, shape.ffn), (shape.hidden, shape.hidden), (kv, shape.hidden))
    return [(tokens, n, k) for n, k in dims]


def _operands(role: str, m: int, n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[M, K] and [K, N] in bf16, in memory as in a step."""
    a = torch.randn(k, m, device=device, dtype=torch.bfloat16).t() if role == "wgrad " else None
    if a is None:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    if role:  # the weight as it is, or the input
        return a, torch.randn(k, n, device=device, dtype=torch.bfloat16)
    return a, torch.randn(n, k, device=device, dtype=torch.bfloat16).t()


def _bf16(role: str, m: int, n: int, k: int, device: torch.device) -> Rate:
    a, b = _operands(role, m, n, k, device)
    return f"gemm bf16 {role}{m}x{n}x{k}", 2.0 * m * n * k, lambda: torch.mm(a, b)


def _fp8(kind: str, role: str, m: int, n: int, k: int, device: torch.device) -> Rate:
    """Operands are cast and laid out before: row-major times column-major, which is all that FP8 takes."""
    x, y = _operands(role, m, n, k, device)
    rowwise = kind.startswith("rowwise")
    a = x.to(E5M2 if role and not rowwise else E4M3).contiguous()
    b = y.to(E4M3).t().contiguous().t()
    scale_a = torch.ones((m, 1) if rowwise else (), device=device)
    scale_b = torch.ones((1, n) if rowwise else (), device=device)
    fast = kind.endswith("fast")

    def run() -> Tensor:
        return torch._scaled_mm(
            a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )  # fmt: skip

    return f"gemm fp8 {kind} {role}{m}x{n}x{k}", 2.0 * m * n * k, run


def _copy(device: torch.device, size: int) -> Rate:
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    return COPY, 2.0 * source.nbytes, lambda: target.copy_(source)


def _attention(shape: models.Shape, batch: int, device: torch.device, *, backward: bool) -> Rate:
    """Causal attention of a block: 2 T^2 D FLOPs per head forward, 2.5 times as many backward."""
    length, dim = shape.sequence, shape.head_dim
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        torch.randn(batch, length, count, dim, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for count in heads
    )
    flops = 2.0 * batch * shape.heads * length**2 * dim
    name = f"{batch}x{shape.heads}x{shape.kv_heads}x{length}x{dim}"
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    if not backward:
        with torch.no_grad():
            leaves = [tensor.detach() for tensor in (q, k, v)]
        return f"attention forward {name}", flops, lambda: F.scaled_dot_product_attention(
            *leaves, is_causal=True, enable_gqa=True
        )  # fmt: skip
    grad = torch.randn_like(y)
    return f"attention backward {name}", 2.5 * flops, lambda: torch.autograd.grad(
        y, (q, k, v), grad, retain_graph=True
    )  # fmt: skip


def _rate(amount: float, run: Run, settings: Settings) -> float:
    """Per second, by the median of runs with a pause between them."""
    for _ in range(3):
        run()
    samples = [measure.one(run, settings.torch_device) for _ in range(3 if settings.smoke else SAMPLES)]
    return float(amount / (measure.summary(samples)["ms"] * 1e-3))


def _sustained(amount: float, run: Run, settings: Settings) -> float:
    """Per second, of runs without a pause."""
    device = settings.torch_device
    once = max(measure.one(run, device), 1e-3)
    count = 3 if settings.smoke or not values_exist() else max(int(SUSTAINED_SECONDS * 1e3 / once), 3)

    def all_of_them() -> None:
        for _ in range(count):
            run()

    return float(amount * count / (measure.one(all_of_them, device) * 1e-3))
