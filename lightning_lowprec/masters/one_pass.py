"""Step parameters with masters in one pass over the memory: a kernel reads and writes every value once.

Bytes per parameter, with bf16 gradients and Adam: 28 with float32 masters, 26 with remainders, 22 with stochastic
rounding, 14 with bf16 moments too. The same step by torch's own code moves gradients and loads masters first.

A parameter is stepped in one pass if it is on a GPU and dense, its optimizer is exactly torch's ``AdamW``, ``Adam``
(without ``amsgrad``) or ``SGD``, and its state exists: torch's own code makes the first step. The rest goes through
``registry.stepping_only``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_lowprec.masters.moment_rows import KINDS, moments_of
from lightning_lowprec.masters.registry import MasterRegistry
from lightning_lowprec.masters.rules import NUMBERS, Rule, numbers_of, rule_of
from lightning_lowprec.masters.stores import Store
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.from_host import tensor_on
from lightning_lowprec.numerics.largest import Largest, asked
from lightning_lowprec.numerics.triton_runs import is_simulated, kernels_run
from lightning_lowprec.private.torch import add_to_all_, copy_all_, increment_versions

DEVICES = {"cuda"}
NOTE_WRITTEN: Final = "note_written"
"""The method of a weight that needs to know of writes."""
_VECTOR: Final = 16  # bytes; the kernel reads aligned tensors in pieces of this size


@final
@dataclass(frozen=True)
class Variant:
    """What one compiled form of the kernel is for."""

    rule: str
    form: str
    weight: str
    grad: str
    moment: str
    aligned: bool
    group: int = 1
    """Elements that share an exponent, where moments have 8 bits."""


@final
@dataclass(frozen=True, eq=False, repr=False)  # a master may have no memory, so that it must not be printed
class Row:
    """One parameter: its tensors as the kernel gets them, and its position among all parameters."""

    variant: Variant
    tensors: tuple[Tensor | None, ...]
    """Weight, master or remainder, gradient, first and second moment, exponents of the moments."""
    position: int
    step: Tensor | None
    param: Tensor
    master: Tensor
    largest: Largest | None
    """Where the largest absolute value of the new weight is wanted."""


@torch.no_grad()
def step_in_one_pass(optimizer: Optimizer, plain: type, registry: MasterRegistry) -> None:
    """Step the parameters that the kernel can step, and drop their gradients; the others keep theirs."""
    for group in optimizer.param_groups:
        places = [registry.place_of[id(p)] for p in group["params"] if id(p) in registry.place_of]
        _step_places(places, optimizer, plain, group, registry, registry.gradients.factor)


@torch.no_grad()
def step_one(
    param: Tensor, optimizer: Optimizer, plain: type, registry: MasterRegistry, factor: float | Tensor
) -> None:
    """Step one parameter, which has a master, with its gradient times ``factor``, if the kernel can step it."""
    group = next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))
    _step_places([registry.place_of[id(param)]], optimizer, plain, group, registry, factor)


def _step_places(
    places: list[tuple[Store, int]],
    optimizer: Optimizer,
    plain: type,
    group: Any,
    registry: MasterRegistry,
    factor: float | Tensor,
) -> None:
    rule = rule_of(plain, group)
    if rule is None or not any(store.device.type in DEVICES for store, _ in places) or not kernels_run():
        return
    for store in dict.fromkeys(store for store, _ in places):
        registry.settle(store)
    rows = [row for store, index in places if (row := _row(rule, registry, optimizer, store, index)) is not None]
    for same in _by_variant(rows):
        _step_rows(same, rule, plain, group, registry, factor)
    for row in rows:
        row.param.grad = row.master.grad = None
    for store in {store for store, _ in places}:
        store.note_step()


def _row(rule: Rule, registry: MasterRegistry, optimizer: Optimizer, store: Store, index: int) -> Row | None:
    """Return what the kernel needs of a parameter, or None if the kernel cannot step it."""
    param, master = store.params[index], store.masters[index]
    grad = master.grad if param.grad is None else param.grad
    if grad is None or grad.is_sparse or grad.dtype not in KINDS:
        return None
    moments = moments_of(rule, registry, optimizer, store, param)
    if moments is None:
        return None
    weight = local(param)
    tensors = [weight, store.companion(index), local(grad), *moments.tensors]
    fits = all(t is None or (t.stride() == weight.stride() and t.device == weight.device) for t in tensors)
    if not _is_plain(weight) or not fits or not _is_dense(weight):
        return None
    aligned = all(t is None or t.data_ptr() % _VECTOR == 0 for t in tensors)
    variant = Variant(
        rule.kernel, store.form, KINDS[weight.dtype], KINDS[grad.dtype], moments.kind, aligned, moments.group
    )
    filled = [*tensors, None, None][:5]
    step = optimizer.state.get(param, {}).get("step")
    return Row(variant, (*filled, *moments.exponents), store.position(index), step, param, master, asked(param))


def _is_plain(weight: Tensor) -> bool:
    """Return whether a kernel may write to the memory of a weight, and can say so where the weight wants to know."""
    return type(weight) in (Tensor, Parameter) or hasattr(weight, NOTE_WRITTEN) or is_simulated()


def _is_dense(tensor: Tensor) -> bool:
    """Return whether every element of the tensor's memory is an element of the tensor, once."""
    return tensor.numel() > 0 and tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _by_variant(rows: Sequence[Row]) -> Iterator[list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.variant, row.tensors[0].device), []).append(row)  # type: ignore[union-attr]
    yield from found.values()


def _step_rows(
    rows: list[Row], rule: Rule, plain: type, group: Any, registry: MasterRegistry, factor: float | Tensor
) -> None:
    steps = [row.step for row in rows if row.step is not None] if rule.counts else []
    if steps:
        add_to_all_(steps, 1)
    device = rows[0].tensors[0].device  # type: ignore[union-attr]
    numbers = torch.zeros(len(rows), NUMBERS) if is_simulated() else numbers_of(rule, plain, group, steps, len(rows))
    factor = factor if rows[0].master.grad is None else 1.0
    hints = [(row.largest, row.param) for row in rows if row.largest is not None]
    if hints:
        copy_all_([hint.value for hint, _ in hints], [_constant(device, 0.0)] * len(hints))
    launch(rows, _to(device, numbers), _scalar(device, factor), registry.config.seed, registry.step)
    written = [t for row in rows for i, t in enumerate(row.tensors) if t is not None and i != 2]
    for row in rows:
        weight = row.tensors[0]
        if hasattr(weight, NOTE_WRITTEN):
            weight.note_written()  # type: ignore[union-attr]
    increment_versions([*written, *(row.param for row in rows)])
    for hint, param in hints:
        hint.note(param)


def launch(rows: Sequence[Row], numbers: Tensor, factor: Tensor, seed: int, step: int) -> None:
    """Run the kernel once for all ``rows``, which are of one variant and on one device.

    Args:
        rows: the parameters.
        numbers: (len(rows), 9) float32 on the device, see `rules.py`.
        factor: a float32 scalar on the device, which multiplies the gradients.
        seed: the seed of the run, for stochastic rounding.
        step: the number of steps before this one.
    """
    if is_simulated():
        return
    from lightning_lowprec.masters import kernel

    weights = [row.tensors[0] for row in rows]
    sizes = tuple(weight.numel() for weight in weights if weight is not None)
    pointers = [[_address(t) for t in (*row.tensors, None, None)][:7] for row in rows]
    hints = [_address(None if row.largest is None else row.largest.value) for row in rows]
    table = [
        number
        for p, size, row, hint in zip(pointers, sizes, rows, hints, strict=True)
        for number in (*p, size, row.position, hint)
    ]
    variant, device = rows[0].variant, numbers.device
    tiles = _tiles(sizes, device, kernel.TILE.value)
    with torch.cuda.device(device) if device.type == "cuda" else torch.device(device):
        kernel.step_parameters[(len(tiles),)](
            tiles, tensor_on(device, table, torch.int64), numbers, factor, seed, step, RULE=variant.rule,
            FORM=variant.form, WEIGHT=variant.weight, GRAD=variant.grad, MOMENT=variant.moment,
            ALIGN=_VECTOR if variant.aligned else 1, GROUP=variant.group, MEASURE=any(hints), num_warps=8,
        )  # fmt: skip


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.lru_cache(maxsize=16)
def _tiles(sizes: tuple[int, ...], device: torch.device, tile: int) -> Tensor:
    """Return the parameter and the number within the parameter of every tile: (tiles, 2) int32."""
    counts = torch.tensor([-(-size // tile) for size in sizes])
    rows = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    firsts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    pairs = torch.stack([rows, torch.arange(len(rows)) - firsts], dim=1)
    return _to(device, pairs.to(torch.int32))


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def _scalar(device: torch.device, factor: float | Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor.to(device=device, dtype=torch.float32)
    return _constant(device, factor) if factor == 1.0 else tensor_on(device, [factor], torch.float32)


def _constant(device: torch.device, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device) if is_simulated() else _kept(device, value)


@functools.cache
def _kept(device: torch.device, value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)
