"""One entry of the ledger: what a training step asks of a GPU. Plain data, from records to JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.ledger.moved import Operation
from benchmarks.ledger.recorder import Record

PHASES = ("forward", "backward", "optimizer")
OUTSIDE = "outside"
"""The part of a phase that belongs to no block: embedding, last norm, head and loss."""
SCALES = {"0": "", "1": "nvfp4", "2": "mxfp8", "3": "row scales", "4": "block scales", "5": "block scales"}
"""cuBLASLt's kinds of scales."""


@dataclass
class Amount:
    """What one stretch of a step asks for."""

    kernels: int = 0
    products: int = 0
    copies: int = 0
    """Copies and fills."""
    bytes: int = 0
    """Read and written by everything but matrix products and attention."""
    attention_flops: int = 0
    product_flops: dict[str, int] = field(default_factory=dict)
    """By format."""
    unknown_bytes: int = 0
    """Kernels of which nobody knows the bytes."""

    def add(self, other: Amount) -> None:
        """Add another stretch to this one."""
        for name in ("kernels", "products", "copies", "bytes", "attention_flops", "unknown_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.product_flops = dict(Counter(self.product_flops) + Counter(other.product_flops))


@dataclass
class Entry:
    """What one contender asks for in one step, in steady state."""

    contender: str
    device: str
    shape: dict[str, Any]
    batch: int
    parameters: int
    stretches: dict[str, dict[str, Amount]]
    """By phase, then by block ("0", "1", ...) or `OUTSIDE`."""
    waits: list[str]
    """Where the host waits for the GPU."""
    refused: list[str]
    """What the hardware, or the null GPU, does not do."""
    mallocs: int
    """Calls of cudaMalloc in the step."""
    graphs: int
    graph_breaks: dict[str, int]
    memory: dict[str, int]
    """Bytes: weights, gradients, optimizer, and the peak of each phase."""
    loose: dict[str, int]
    """Kernels of unknown bytes, by name."""
    kernels: list[str]
    """All launches, fills and products in order: names, and shapes of products."""
    host_ms: float
    """The smallest time of the host for a step; a time of this machine's CPU, not of a GPU."""
    python_calls: int = 0
    """Python functions that the host calls in a step; 0 in ledgers that did not count them."""

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return int(self.shape["layers"])

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * int(self.shape["sequence"])

    def phase(self, name: str) -> Amount:
        """Return the sum over a phase."""
        return total(self.stretches.get(name, {}).values())

    def whole(self) -> Amount:
        """Return the sum over the step."""
        return total(self.phase(name) for name in PHASES)

    def per_block(self, what: str) -> float:
        """Return an amount, such as ``"bytes"``, of forward and backward of all blocks, over the number of blocks."""
        blocks = [str(index) for index in range(self.blocks)]
        parts = [self.stretches.get(phase, {}).get(block, Amount()) for phase in PHASES[:2] for block in blocks]
        summed: int = getattr(total(parts), what)
        return summed / self.blocks

    @property
    def peak(self) -> int:
        """The most bytes that torch had allocated during the step."""
        return max(self.memory[f"peak in {phase}"] for phase in PHASES)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Entry:
        """Return the entry of plain data."""
        stretches = {
            phase: {part: Amount(**amount) for part, amount in parts.items()}
            for phase, parts in data["stretches"].items()
        }
        return cls(**{**data, "stretches": stretches})


def total(amounts: Any) -> Amount:
    """Return the sum of amounts."""
    result = Amount()
    for amount in amounts:
        result.add(amount)
    return result


def format_of(record: Record) -> str:
    """Return the name of a product's format, such as "float8 exact", by dtypes, accumulation and scales."""
    a, b = record.get("a"), record.get("b")
    if not a.startswith(("float8", "float4")):
        return a if a == b else f"{a} x {b}"
    scales = SCALES.get(record.get("scales").partition(",")[0], "other scales")
    kind = {"nvfp4": "float4", "mxfp8": "mxfp8"}.get(scales) or " ".join(filter(None, ["float8", scales]))
    return f"{kind} {'fast' if record.get('fast') == '1' else 'exact'}"


def amounts(
    records: Sequence[Record],
    operations: Sequence[Operation],
    triton: Mapping[str, int],
    launches: Mapping[int, int] | None = None,
) -> tuple[dict[str, dict[str, Amount]], Counter[str]]:
    """Sort records into phases and blocks, by the marks among them; returns the amounts, and kernels of unknown bytes.

    A mark "phase forward" begins a phase, "block 3" or "block outside" a part of it. ``triton`` has the bytes of a
    kernel by its name, ``launches`` those of a launch of a kernel of any size by the index of the record.
    """
    found: dict[str, dict[str, Amount]] = {}
    loose: Counter[str] = Counter()
    known = {index for operation in operations for index in range(operation.first, operation.last)}
    starting = {operation.first: operation for operation in operations}
    by_kernel = {
        operation.last - 1: operation
        for operation in operations
        if operation.kind == "product"
        and operation.flops
        and all(record.what != "gemm" for record in records[operation.first : operation.last])
    }
    phase, part = PHASES[0], OUTSIDE
    for index, record in enumerate(records):
        if record.what == "mark":
            kind, _, value = record.name.partition(" ")
            phase, part = (value, OUTSIDE) if kind == "phase" else (phase, value)
            continue
        amount = found.setdefault(phase, {}).setdefault(part, Amount())
        operation = starting.get(index)
        if operation is not None:
            amount.bytes += operation.bytes
            if operation.kind == "attention":
                amount.attention_flops += operation.flops
        if index in by_kernel:  # a kernel that multiplies, such as torchao's of int8
            amount.products += 1
            _add_flops(amount, by_kernel[index].name, by_kernel[index].flops)
            continue
        _count(amount, record)
        if record.what == "kernel" and index not in known:
            if record.name in triton:
                amount.bytes += (launches or {}).get(index, triton[record.name])
            else:
                amount.unknown_bytes += 1
                loose[record.name] += 1
    return found, loose


def _count(amount: Amount, record: Record) -> None:
    if record.what == "kernel":
        amount.kernels += 1
    elif record.what in ("memcpy", "memset"):
        amount.copies += 1
    elif record.what == "gemm":
        amount.products += 1
        m, n, k, batch = (record.number(key) for key in ("m", "n", "k", "batch"))
        _add_flops(amount, format_of(record), 2 * m * n * k * max(batch, 1))


def _add_flops(amount: Amount, which: str, flops: int) -> None:
    amount.product_flops[which] = amount.product_flops.get(which, 0) + flops
