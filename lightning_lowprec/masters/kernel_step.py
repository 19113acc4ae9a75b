"""Step parameters with masters in one pass over the memory: a kernel reads and writes every value once.

Bytes per parameter, with bf16 gradients and Adam: 28 with float32 masters, 26 with remainders, 22 with stochastic
rounding. The same step by torch's own code moves gradients and loads masters first.

A parameter is stepped in one pass if it is on a GPU and dense, its optimizer is exactly torch's ``AdamW``, ``Adam``
(without ``amsgrad``) or ``SGD``, and its state exists: torch's own code makes the first step, and steps the rest.

Operations and names of the update rules are those of ``torch.optim``'s ``_single_tensor_adam`` and
``_single_tensor_sgd``.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from lightning_lowprec.masters.moments import CODES, EXPONENTS, adam_state, block_of, is_dense
from lightning_lowprec.masters.registry import MasterRegistry
from lightning_lowprec.masters.stores import Group, Store
from lightning_lowprec.numerics.fp8_matrices import Largest, asked
from lightning_lowprec.numerics.one_pass import is_simulated, on_device, tensor_on
from lightning_lowprec.numerics.parameters import grouped
from lightning_lowprec.private.torch import add_to_all_, copy_all_, increment_versions, local_tensor

DEVICES = {"cuda"}
NOTE_WRITTEN: Final = "note_written"  # the method of a weight that needs to know of writes
KINDS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # the kernel's words for dtypes
NUMBERS: Final = 9  # numbers of a parameter for the kernel, see `numbers_of`
_VECTOR: Final = 16  # bytes; the kernel reads aligned tensors in pieces of this size
Rule = Literal["adam", "sgd", "momentum", "nesterov"]
"""The update rules of the kernel."""
STATE: Final[Mapping[Rule, tuple[str, ...]]] = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
}
"""The optimizer's state that has the shape of a parameter; Adam's has a `step` too."""


class Variant(NamedTuple):
    """The constants of one compiled form of the kernel, in the order in which the kernel takes them."""

    rule: str
    form: str
    weight: str
    grad: str
    moment: str
    align: int  # bytes
    group: int  # elements that share an exponent, where moments have 8 bits


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
    largest: Largest | None  # where the largest absolute value of the new weight is wanted


def rule_of(plain: type, group: Mapping[str, Any]) -> Rule | None:
    """Return the kernel's rule for a parameter group of an optimizer of class ``plain``, or None."""
    if group.get("differentiable"):
        return None
    if plain in (optim.Adam, optim.AdamW):
        if group["amsgrad"] or any(isinstance(beta, Tensor) for beta in group["betas"]):
            return None
        return "adam"
    if plain is not optim.SGD or any(isinstance(group[name], Tensor) for name in ("momentum", "dampening")):
        return None
    if not group["momentum"]:
        return "sgd"
    return "nesterov" if group["nesterov"] else "momentum"


def numbers_of(rule: Rule, plain: type, group: Mapping[str, Any], steps: Sequence[Tensor], count: int) -> Tensor:
    """Return the numbers of ``count`` parameters of a group for the kernel: (count, 9) float32.

    Columns: the factor of the gradient (-1 to maximize), L2 penalty, decay of the weight, share of the gradient in the
    first moment (momentum), decay of the second moment (share of the gradient in the momentum), share of the squared
    gradient, minus the step size, eps, square root of the second bias correction. ``steps`` count this step too. The
    result is on the device of the learning rate, which may be a tensor, and of the steps. Nothing is read from a GPU.
    """
    if is_simulated():
        return torch.zeros(count, NUMBERS)
    lr, sign = group["lr"], -1.0 if group["maximize"] else 1.0
    devices = {t.device for t in (lr, *steps) if isinstance(t, Tensor)} - {torch.device("cpu")}
    device = devices.pop() if devices else torch.device("cpu")
    rate = torch.as_tensor(lr, dtype=torch.float64, device=device) if isinstance(lr, Tensor) else float(lr)
    columns: list[float | Tensor]
    if rule != "adam":
        columns = [sign, group["weight_decay"], 1.0, group["momentum"], 1.0 - group["dampening"], 0.0, -rate, 0.0, 1.0]
    else:
        beta1, beta2 = group["betas"]
        if device.type == "cpu":
            step: Tensor = torch.tensor([float(s) for s in steps], dtype=torch.float64)
        else:
            step = torch.stack([s.to(device, non_blocking=True) for s in steps]).double()
        decay = group["weight_decay"]
        decoupled = group.get("decoupled_weight_decay", plain is optim.AdamW)
        decays = (0.0, 1.0 - rate * decay) if decoupled else (decay, 1.0)
        averages = (1.0 - beta1, beta2, 1.0 - beta2)
        columns = [sign, *decays, *averages, -rate / (1.0 - beta1**step), group["eps"], (1.0 - beta2**step).sqrt()]
    numbers = [column for column in columns if not isinstance(column, Tensor)]
    constant = iter(tensor_on(device, numbers, torch.float64))
    parts = [column if isinstance(column, Tensor) else next(constant) for column in columns]
    return torch.stack([part.expand(count) for part in parts], dim=1).float()


@torch.no_grad()
def step_in_one_pass(registry: MasterRegistry, options: Any, group: Group, rule: Rule, steps: int) -> None:
    """Step the parameters of a group that the kernel can step, and drop their gradients; the others keep theirs."""
    rows = [
        row
        for store in group.stores
        for index, p in enumerate(store.params)
        if id(p) in group.ids and (row := _row(registry, options, rule, store, index)) is not None
    ]
    if rows:
        _step_rows(registry, options, rule, steps, grouped(rows, lambda row: (row.variant, row.master.grad is None)))
    for row in rows:
        row.param.grad = row.master.grad = None
    for store in group.stores:
        store.note_agreement()


def _row(registry: MasterRegistry, group: Any, rule: Rule, store: Store, index: int) -> Row | None:
    """Return what the kernel needs of a parameter, or None if the kernel cannot step it."""
    param, master = store.params[index], store.masters[index]
    grad = master.grad if param.grad is None else param.grad
    if grad is None or grad.is_sparse or grad.dtype not in KINDS:
        return None
    block = block_of(param) if registry.config.moments == "8bit" else 0
    states = registry.live().state
    state: Any = states.get(param, {})
    if block and rule == "adam" and not state:  # torch makes others
        state = states[param] = adam_state(group, param)
    names = [f"{name}{CODES}" if block else name for name in STATE[rule]]
    if any(state.get(name) is None for name in names) or (rule == "adam" and "step" not in state):
        return None  # torch's own code makes them
    moments = [local_tensor(state[name]) for name in names]
    if not block and any(moment.dtype != torch.float32 for moment in moments):
        return None
    weight = local_tensor(param)
    tensors = [weight, store.companion(index), local_tensor(grad), *moments]
    fits = all(t is None or (t.stride() == weight.stride() and t.device == weight.device) for t in tensors)
    # a kernel may write to the memory of a weight, where the weight sees it or does not want to know
    writes = type(weight) in (Tensor, Parameter) or hasattr(weight, NOTE_WRITTEN) or is_simulated()
    if not writes or not fits or not weight.numel() or not is_dense(weight):
        return None
    aligned = all(t is None or t.data_ptr() % _VECTOR == 0 for t in tensors)
    align, kind = _VECTOR if aligned else 1, "8bit" if block and moments else "fp32"
    variant = Variant(rule, store.form, KINDS[weight.dtype], KINDS[grad.dtype], kind, align, block or 1)
    exponents = [local_tensor(state[f"{name}{EXPONENTS}"]) for name in STATE[rule]] if block else []
    largest = asked(param)
    filled = (*[*tensors, None, None][:5], *exponents, None, None)[:7]
    return Row(variant, filled, store.positions[index], state.get("step"), param, master, largest)


def _step_rows(
    registry: MasterRegistry, group: Any, rule: Rule, steps_before: int, by_variant: list[list[Row]]
) -> None:
    """Step rows of one device; their numbers are computed together, in launches that do not depend on the variants."""
    rows = [row for same in by_variant for row in same]
    steps = [row.step for row in rows if row.step is not None] if rule == "adam" else []
    if steps:
        add_to_all_(steps, 1)
    device = rows[0].tensors[0].device  # type: ignore[union-attr]
    numbers = _to(device, numbers_of(rule, registry.plain, group, steps, len(rows)))
    hints = [(row.largest, row.param) for row in rows if row.largest is not None]
    if hints:
        copy_all_([hint.value for hint, _ in hints], [_constant(device, 0.0)] * len(hints))
    for same, own in zip(by_variant, torch.split(numbers, [len(same) for same in by_variant]), strict=True):
        scale = _scalar(device, 1.0 if registry.factor is None or same[0].master.grad is not None else registry.factor)
        launch(same, own, scale, registry.config.seed, steps_before)
    written = [t for row in rows for i, t in enumerate(row.tensors) if t is not None and i != 2]
    for row in rows:
        weight = row.tensors[0]
        if hasattr(weight, NOTE_WRITTEN):
            weight.note_written()  # type: ignore[union-attr]
    increment_versions([*written, *(row.param for row in rows)])
    for hint, param in hints:
        hint.note(param)


def launch(rows: Sequence[Row], numbers: Tensor, factor: Tensor, seed: int, step: int) -> None:
    """Run the kernel once for all ``rows``, of one variant and device, with their :func:`numbers_of`.

    ``factor``, a float32 scalar, multiplies the gradients; ``step`` counts the steps before this one.
    """
    if is_simulated():
        return
    from lightning_lowprec.masters import kernel

    sizes = tuple(local_tensor(row.param).numel() for row in rows)
    hints = [None if row.largest is None else row.largest.value for row in rows]
    table: list[int] = []
    for row, size, hint in zip(rows, sizes, hints, strict=True):
        *addresses, largest = [0 if t is None else t.data_ptr() for t in (*row.tensors, hint)]
        table += [*addresses, size, row.position, largest]
    device, measure = numbers.device, any(hint is not None for hint in hints)
    tiles, addresses_there = _tiles(sizes, device, kernel.TILE.value), tensor_on(device, table, torch.int64)
    with on_device(device):
        kernel.step_parameters[(len(tiles),)](
            tiles, addresses_there, numbers, factor, seed, step, *rows[0].variant, measure, num_warps=8
        )


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
