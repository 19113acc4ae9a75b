"""Step parameters with masters in one pass over the memory: a kernel reads and writes every value once.

Bytes per parameter, with bf16 gradients and Adam: 28 with float32 masters, 26 with remainders, 22 with stochastic
rounding. The same step by torch's own code moves gradients and loads masters first.

A parameter is stepped in one pass if it is on a GPU and dense, its optimizer is exactly torch's ``AdamW``, ``Adam``
(without ``amsgrad``) or ``SGD``, and its state exists: torch's own code makes the first step, and steps the rest.

Operations and names of the update rules are those of ``torch.optim``'s ``_single_tensor_adam`` and
``_single_tensor_sgd``.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, optim
from torch.nn import Parameter

from lightning_lowprec.masters.moments import CODES, EXPONENTS, adam_state, block_of, encode_state, is_dense
from lightning_lowprec.masters.registry import MasterRegistry
from lightning_lowprec.masters.stores import Group
from lightning_lowprec.numerics.fp8_matrices import Largest, asked
from lightning_lowprec.numerics.one_pass import is_simulated, on_device, tensor_on
from lightning_lowprec.numerics.parameters import grouped
from lightning_lowprec.private.torch import copy_all_, local_tensor

DEVICES = {"cuda"}
NOTE_WRITTEN: Final = "note_written"  # the method of a weight that needs to know of writes
KINDS: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # the kernel's words for dtypes
COLUMNS: Final = 10  # of the table of addresses, see `kernel.COLUMNS`
GRADIENT: Final = 2  # the column of the gradients, which are new in each step
NUMBERS: Final = 9  # numbers of a parameter for the kernel, see `numbers_of`
_VECTOR: Final = 16  # bytes; the kernel reads aligned tensors in pieces of this size
_grad_of: Final = attrgetter("grad")
_dtype_of: Final = attrgetter("dtype")
_NO_STATE: Final[dict[str, object]] = {}
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
    """Weight, master or remainder, first and second moment, exponents of the moments."""
    place: int  # of the parameter in its group
    moved: bool  # whether its gradient is at the master
    position: int
    step: Tensor | None
    param: Tensor
    largest: Largest | None  # where the largest absolute value of the new weight is wanted


Seen = tuple[object, ...]


@final
class Table:
    """The rows of a group, and what they were made of: steps use them until something of it is another one."""

    def __init__(self, seen: Seen, rows: Sequence[Row]) -> None:
        self.seen = seen
        launches = grouped(rows, lambda row: (row.variant, row.moved))
        self.rows = [row for same in launches for row in same]
        self.steps = _joined([row.step for row in self.rows if row.step is not None])
        self.hints = [(row.largest, row.param) for row in self.rows if row.largest is not None]
        weights = [local_tensor(row.param) for row in self.rows]
        written = [t for row, weight in zip(self.rows, weights, strict=True) for t in {weight, row.param}]
        self.written = [t for t in written if not t.is_inference()]
        self.noting: list[Any] = [weight for weight in weights if hasattr(weight, NOTE_WRITTEN)]
        self.places = [row.place for row in self.rows]
        self.tensors = [t for row in self.rows for t in (*row.tensors, row.step) if t is not None]
        self.pointers = [*map(Tensor.data_ptr, self.tensors)]
        self.device = weights[0].device if weights else torch.device("cpu")
        count = len(rows)
        self.on_host = torch.zeros(count * COLUMNS + -(-count * NUMBERS // 2), dtype=torch.int64)
        """Addresses and :func:`numbers_of`, for one copy to the device."""
        self.there = self.on_host if is_simulated() else torch.empty_like(self.on_host, device=self.device)
        self.sent: object = None
        self.addresses, self.numbers = _parts(self.on_host, count)
        addresses, numbers = _parts(self.there, count)
        self.columns = numbers.unbind(1)
        starts = itertools.accumulate(map(len, launches), initial=0)
        self.launches = [
            (
                same,
                tuple([local_tensor(row.param).numel() for row in same]),
                any(row.largest is not None for row in same),
                addresses[start:],
                numbers[start:],
            )
            for same, start in zip(launches, starts, strict=False)
        ]
        for line, row, weight in zip(self.addresses, self.rows, weights, strict=True):
            first, second, *others = [0 if t is None else t.data_ptr() for t in row.tensors]
            hint = 0 if row.largest is None else row.largest.value.data_ptr()
            line[:] = torch.tensor([first, second, 0, *others, weight.numel(), row.position, hint])

    def moved(self) -> bool:
        """Return whether a tensor has other memory now, as after ``.data =``."""
        return self.pointers != [*map(Tensor.data_ptr, self.tensors)]

    def send(self, gradients: Sequence[int], numbers: Sequence[Sequence[Any]]) -> None:
        """Send what has changed since the last step; ``gradients`` are addresses by the place in the group."""
        columns = {at: number for at, number in enumerate(numbers[0]) if isinstance(number, Tensor)}
        rows = [[0.0 if at in columns else number for at, number in enumerate(row)] for row in numbers]
        sending = [gradients[place] for place in self.places], rows
        if sending != self.sent:
            self.sent = sending
            self.addresses[:, GRADIENT] = torch.tensor(sending[0])
            self.numbers.copy_(torch.tensor(rows, dtype=torch.float32))
            self.there.copy_(_to(self.device, self.on_host))
        for at, column in columns.items():
            self.columns[at].copy_(column)


def _parts(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the addresses and the numbers of a table of ``count`` parameters: (count, 10) and (count, 9)."""
    addresses, numbers = table[: count * COLUMNS], table[count * COLUMNS :].view(torch.float32)
    return addresses.view(count, COLUMNS), numbers[: count * NUMBERS].view(count, NUMBERS)


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


def numbers_of(rule: Rule, plain: type, group: Mapping[str, Any], steps: Tensor) -> list[list[Any]]:
    """Return the numbers of the parameters of a group for the kernel: a row for each, or one row for all.

    Columns: the factor of the gradient (-1 to maximize), L2 penalty, decay of the weight, share of the gradient in the
    first moment (momentum), decay of the second moment (share of the gradient in the momentum), share of the squared
    gradient, minus the step size, eps, square root of the second bias correction. ``steps`` count this step too. Where
    they or the learning rate are on a GPU, a row has tensors, one number or one per parameter: nothing is read there.
    """
    lr, counts = group["lr"], [0.0]
    on_gpu = next((t.device for t in (lr, steps) if isinstance(t, Tensor) and not t.is_cpu), None)
    if on_gpu is not None:
        rate = torch.as_tensor(lr, dtype=torch.float64, device=on_gpu) if isinstance(lr, Tensor) else float(lr)
        return [_numbers(rule, plain, group, rate, steps.to(on_gpu, torch.float64, non_blocking=True))]
    if rule == "adam":
        counts = steps.tolist()
    of_count = {each: _numbers(rule, plain, group, float(lr), each) for each in set(counts)}
    return [of_count[each] for each in counts] if len(of_count) > 1 else [*of_count.values()]


def _numbers(rule: Rule, plain: type, group: Mapping[str, Any], rate: Any, step: Any) -> list[Any]:
    sign, decay = -1.0 if group["maximize"] else 1.0, group["weight_decay"]
    if rule != "adam":
        return [sign, decay, 1.0, group["momentum"], 1.0 - group["dampening"], 0.0, -rate, 0.0, 1.0]
    beta1, beta2 = group["betas"]
    decoupled = group.get("decoupled_weight_decay", plain is optim.AdamW)
    decays = (0.0, 1.0 - rate * decay) if decoupled else (decay, 1.0)
    averages = (1.0 - beta1, beta2, 1.0 - beta2)
    return [sign, *decays, *averages, -rate / (1.0 - beta1**step), group["eps"], (1.0 - beta2**step) ** 0.5]


@torch.no_grad()
def step_in_one_pass(registry: MasterRegistry, optimizer: Any, group: Group, rule: Rule, steps: int) -> bool:
    """Step the parameters of a group that the kernel can step, and drop their gradients; the others keep theirs.

    Return whether these were all parameters of the stores.
    """
    options, state = optimizer.param_groups[group.index], optimizer.state
    grads, at_masters = [*map(_grad_of, group.params)], [*map(_grad_of, group.masters)]
    moved = [place for place, grad in enumerate(at_masters) if grad is not None]
    for place in moved:
        grads[place] = at_masters[place]
    grads = [*map(local_tensor, grads)] if group.sharded else grads
    addresses = [0 if grad is None or grad.is_sparse else grad.data_ptr() for grad in grads]
    table, seen = group.table, _seen(rule, group, state, grads, addresses, moved)
    if not isinstance(table, Table) or table.seen != seen or table.moved():
        if registry.config.moments == "8bit":
            for store in group.stores:
                encode_state(state, store, steps)
        rows = _rows(registry, options, state, rule, group, grads, moved)
        group.table = table = Table(_seen(rule, group, state, grads, addresses, moved), rows)
    if table.rows:
        _step_table(registry, options, rule, table, addresses, steps)
    for place in table.places:
        group.params[place].grad = None
    for place in moved:
        if place in table.places:
            group.masters[place].grad = None
    for store in group.stores:
        if store.allocated:
            store.note_agreement()
    return len(table.rows) == sum([len(store.params) for store in group.stores])


def _seen(
    rule: Rule, group: Group, state: Any, grads: Sequence[Any], addresses: Sequence[int], moved: Sequence[int]
) -> Seen:
    """Return everything that rows are made of, in a form that is compared fast."""
    # a Tensor is hashed by Python code: the state of all groups is read faster than looked up
    is_read = len(state) <= len(group.params) and {*map(type, state.values())} <= {dict}  # a user may add other values
    entries = state.values() if is_read else map(state.get, group.params, itertools.repeat(_NO_STATE))
    held: Sequence[object] = [*itertools.chain.from_iterable(map(dict.values, entries))]
    weights: Sequence[Tensor] = group.params
    if group.sharded:
        held, weights = [local_tensor(x) if isinstance(x, Tensor) else x for x in held], [*map(local_tensor, weights)]
    given = grads if all(addresses) else [grad for grad, at in zip(grads, addresses, strict=True) if at]
    kinds = [*map(_dtype_of, given)], [*map(Tensor.stride, given)], [at and 1 + at % _VECTOR for at in addresses]
    companions = itertools.chain.from_iterable([store.companions for store in group.stores])
    strides = [*map(Tensor.stride, weights)]
    return rule, kinds, moved, Largest.made, [*map(id, companions)], [*map(id, held)], [*map(id, weights)], strides


def _rows(
    registry: MasterRegistry, options: Any, state: Any, rule: Rule, group: Group, grads: Sequence[Any],
    moved: Sequence[int],
) -> list[Row]:  # fmt: skip
    """Return what the kernel needs of the parameters that it can step."""
    rows: list[Row] = []
    for place, (p, grad) in enumerate(zip(group.params, grads, strict=True)):
        block = block_of(p) if registry.config.moments == "8bit" else 0
        if grad is None or grad.is_sparse or grad.dtype not in KINDS:
            continue
        if block and rule == "adam" and not state.get(p):  # torch makes others
            state[p] = adam_state(options, p)
        entry: Any = state.get(p, {})
        ends = (CODES, EXPONENTS) if block else ("",)
        made = [entry.get(f"{name}{end}") for end in ends for name in STATE[rule]]
        step: Any = local_tensor(entry.get("step")) if rule == "adam" else None
        if any(t is None for t in made) or (rule == "adam" and (step is None or step.dim())):
            continue  # torch's own code makes them
        first = rows[0].step if rows else step
        if first is not None and (step.device, step.dtype) != (first.device, first.dtype):
            continue  # counts of a group are one tensor
        made = [*map(local_tensor, made)]
        moments, exponents = made[: len(STATE[rule])], made[len(STATE[rule]) :]
        store, index = registry.place_of[id(p)]
        weight, companion = local_tensor(p), store.companions[index] if store.companions else None
        tensors = [weight, companion, grad, *moments]
        fits = all(t is None or (t.stride() == weight.stride() and t.device == weight.device) for t in tensors)
        # a kernel may write to the memory of a weight, where the weight sees it or does not want to know
        writes = type(weight) in (Tensor, Parameter) or hasattr(weight, NOTE_WRITTEN) or is_simulated()
        if not writes or not fits or not weight.numel() or not is_dense(weight):
            continue
        if not block and any(moment.dtype != torch.float32 for moment in moments):
            continue
        align = _VECTOR if all(t is None or t.data_ptr() % _VECTOR == 0 for t in tensors) else 1
        kind = "8bit" if block and moments else "fp32"
        variant = Variant(rule, store.form, KINDS[weight.dtype], KINDS[grad.dtype], kind, align, block or 1)
        none = [None] * (2 - len(moments))
        row = (weight, companion, *moments, *none, *(exponents or (None,) * len(moments)), *none)
        at_master = place in moved
        rows.append(Row(variant, row, place, at_master, store.positions[index], step, p, asked(p)))
    return rows


def _step_table(
    registry: MasterRegistry, options: Any, rule: Rule, table: Table, gradients: Sequence[int], steps: int
) -> None:
    """Step the rows; ``gradients`` are addresses. Numbers are computed together, in launches that variants share."""
    device = table.device
    table.steps.add_(1)
    if table.hints:
        copy_all_([hint.value for hint, _ in table.hints], [_constant(device, 0.0)] * len(table.hints))
    if not is_simulated():
        table.send(gradients, numbers_of(rule, registry.plain, options, table.steps))
        for same, sizes, measures, addresses, numbers in table.launches:
            factor = _scalar(device, 1.0 if same[0].moved or registry.factor is None else registry.factor)
            launch(same, sizes, measures, addresses, numbers, factor, registry.config.seed, steps)
    for weight in table.noting:
        weight.note_written()
    torch.autograd.graph.increment_version(table.written)
    for hint, param in table.hints:
        hint.note(param)


def _joined(steps: Sequence[Tensor]) -> Tensor:
    """Return one tensor of the counts of steps, (len(steps),); ``steps`` show the memory of the result from now on."""
    if not steps:
        return torch.zeros(0)
    counts = torch.stack([*steps])
    for step, count in zip(steps, counts.unbind(), strict=True):
        step.data = count
    return counts


def launch(
    rows: Sequence[Row],
    sizes: tuple[int, ...],
    measures: bool,
    table: Tensor,
    numbers: Tensor,
    factor: Tensor,
    seed: int,
    step: int,
) -> None:
    """Run the kernel once for all ``rows``, of one variant and device, with their addresses and :func:`numbers_of`.

    ``sizes`` are their numbers of elements. ``measures``: whether a largest absolute value is wanted. ``factor``, a
    float32 scalar, multiplies the gradients; ``step`` counts the steps before this one.
    """
    from lightning_lowprec.masters import kernel

    tiles = _tiles(sizes, numbers.device, kernel.TILE.value)
    with on_device(numbers.device):
        kernel.step_parameters[(len(tiles),)](
            tiles, table, numbers, factor, seed, step, *rows[0].variant, measures, num_warps=8
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
