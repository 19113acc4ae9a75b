"""Store the float32 values of half-precision parameters between optimizer steps, in one of three forms.

| store | parameters | extra bytes between steps | an update below half a step of the dtype |
|---|---|---|---|
| ``Fp32Store`` | fp16, bf16 | 4 | adds up in the master |
| ``RemainderStore`` | bf16 | 2 | adds up, bit for bit as in ``Fp32Store`` |
| ``StochasticStore`` | bf16 | 0 | changes the weight with a probability, right on average |

A store has the parameters of one device and dtype. Their masters are views of one flat float32 buffer, which is made
once. Loading and saving are one multi-tensor copy plus arithmetic on the flat buffer, for any number of parameters.
Freeing the memory is one resize of the buffer's storage; the master tensors stay the same objects, so optimizer state
can be keyed by them. A master must not be read between :meth:`Store.release` and :meth:`Store.load`: it has no memory.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, Final, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import aligned
from lightning_lowprec.numerics.rounding import reconcile
from lightning_lowprec.private.torch import copy_all_, fingerprints, first_element, local_tensor, with_local_tensor

ROUNDING_STEP: Final = "rounding_step"  # in param_groups[0], where state dicts and pickles carry it along
_dtype_of: Final = attrgetter("dtype")
_device_of: Final = attrgetter("device")


class Store(ABC):
    """The masters of ``params``, which share one device and one half-precision dtype; of DTensors, of local shards.

    ``masters`` are leaves on the memory of ``flat``, with the shapes and strides of the parameters, and DTensors where
    these are. ``views`` are plain tensors on the same memory.

    Random bits depend on the ``seed`` of the run, the step and the position only. ``start`` is the position of the
    first element among the elements of all stores of the optimizer, ``positions`` are those of the first elements of
    the shards. Of DTensors, the whole tensors count, so that positions do not depend on the number of ranks.
    """

    form: ClassVar[str]
    group: int = 0  # the index of the optimizer's group
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor], values: Mapping[int, Tensor], *, seed: int, start: int) -> None:
        self.params, self.seed, self.start = list(params), seed, start
        self.dtype, self.device = params[0].dtype, params[0].device
        if self.dtype not in self.dtypes:
            raise ValueError(
                f"{type(self).__name__} keeps masters of {' or '.join(map(str, self.dtypes))} parameters, got"
                f" {self.dtype}. Cast the model to bfloat16, or use float32 masters."
            )
        shards = [local_tensor(p) for p in self.params]
        *offsets, total = itertools.accumulate((aligned(t.numel()) for t in shards), initial=0)
        # a dense tensor keeps its strides (channels_last): multi-tensor kernels need equal strides
        self._layout = [
            (t.shape, torch.empty_like(t, device="meta").stride(), offset)
            for t, offset in zip(shards, offsets, strict=True)
        ]
        self.flat = torch.zeros(total, dtype=torch.float32, device=self.device)
        self.views, self.masters = self.views_on(self.flat), self.tensors_on(self.flat)
        self.companions = self.views if self.form == "fp32" else []
        """What is stored beside the parameters, master or remainder: of their local shapes and strides."""
        self.allocated = True
        *firsts, self.elements = itertools.accumulate((aligned(p.numel()) for p in self.params), initial=0)
        self.positions = [start + at + first_element(p) for at, p in zip(firsts, self.params, strict=True)]
        gaps = {position - offset for position, offset in zip(self.positions, offsets, strict=True)}
        self._in_line = len(gaps) == 1  # the positions follow each other as the memory does
        self._unsaved = False  # whether the memory has values that are stored nowhere else
        self._fingerprints: Sequence[tuple[int, int] | None]  # of the parameters, when they last met the masters
        self.follow_edits()
        self.set_values(values)

    @torch.no_grad()
    def tensors_on(self, flat: Tensor) -> list[Tensor]:
        """Return tensors like ``masters`` on another flat tensor of the same size."""
        made = []
        for layout, like in zip(self._layout, self.params, strict=True):
            made.append(with_local_tensor(flat.as_strided(*layout), like))
        return made

    def views_on(self, flat: Tensor) -> list[Tensor]:
        """Return tensors like ``views`` on another flat tensor of the same size."""
        return [flat.as_strided(*layout) for layout in self._layout]

    def allocate(self) -> None:
        """Allocate the memory; the content is undefined if there was none."""
        if not self.allocated:  # torch would allocate a second time, and copy
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self.allocated = True

    @abstractmethod
    def _round(self, step: int) -> None:
        """Round the buffer to values of the parameters' dtype, and store the difference if the form does so."""

    def _fill(self) -> None:
        """Put the float32 values of all parameters into the (allocated) buffer."""
        copy_all_(self.views, [*map(local_tensor, self.params)])

    @torch.no_grad()
    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values by ``id(parameter)``; a parameter without a value becomes its own master.

        The next load checks whether a value rounds to its parameter: a checkpoint may still change the parameter.
        """
        self.allocate()
        if any(id(p) not in values for p in self.params):
            self._fill()
        for p, view in zip(self.params, self.views, strict=True):
            if id(p) in values:
                view.copy_(local_tensor(values[id(p)]))
        self.follow_edits()
        self._unsaved = True

    @torch.no_grad()
    def arrive(self, values: Mapping[int, Tensor]) -> None:
        """Take loaded values of some parameters by ``id(parameter)``.

        A master that was loaded before, and waits for its parameter, stays where they are a rounding of it.
        """
        if not self.allocated:
            self.load()
        for p, view in zip(self.params, self.views, strict=True):
            if id(p) in values:
                value = local_tensor(values[id(p)]).to(view.device)
                waits = not torch.equal(reconcile(view, local_tensor(p).to(view.device)), view)
                view.copy_(reconcile(view, value) if waits else value)
        self.follow_edits()
        self._unsaved = True

    @torch.no_grad()
    def round_again(self, values: Mapping[int, Tensor]) -> None:
        """Round parameters to the masters ``values`` where they hold another rounding of these, such as fp16's."""
        coming = any(id(p) in values for p in self.params)
        for p, present in zip(self.params, self.values() if coming else self.params, strict=True):
            if id(p) in values:
                new, weight = local_tensor(values[id(p)]).to(self.device), local_tensor(p)
                agrees = reconcile(new, local_tensor(present)) == new
                weight.copy_(torch.where(agrees & (reconcile(new, weight) != new), new, weight.float()))

    @torch.no_grad()
    def value(self, index: int) -> Tensor:
        """Return a copy of the float32 value of one parameter; it follows an edit of the parameter."""
        weight = local_tensor(self.params[index])
        return with_local_tensor(reconcile(self.views[index], weight.to(self.device)), self.params[index])

    def refresh(self) -> None:
        """Follow all edits of the parameters, also those without a trace; masters in memory stay where they agree."""
        if self.allocated:
            self.follow_edits()
            self.load()
        else:
            self.set_values({})

    def follow_edits(self) -> None:
        """Let the next load compare every master with its parameter, also where no edit was noticed."""
        self._fingerprints = [None] * len(self.params)

    @torch.no_grad()
    def load(self) -> None:
        """Give every master its value; a master whose parameter was edited follows the edit."""
        if self.allocated:
            found = fingerprints(self.params)
            for p, view, saved, now in zip(self.params, self.views, self._fingerprints, found, strict=True):
                if now != saved:
                    view.copy_(reconcile(view, local_tensor(p).to(view.device)))
            self._fingerprints = found  # of parameters that did not change
        else:
            self.allocate()
            self._fill()
            self.note_agreement()

    @torch.no_grad()
    def save(self, step: int) -> None:
        """Round the masters into the parameters and free their memory; ``step`` counts the calls."""
        self._round(step)
        copy_all_([*map(local_tensor, self.params)], self.views)
        self.note_agreement()
        self.release()

    def settle(self, step: int) -> None:
        """Make what is stored between steps current for a kernel, after which :meth:`note_agreement` must follow."""
        if self.allocated:
            self.load()
            self.save(step)

    def note_agreement(self) -> None:
        """Note that the parameters agree with their masters now, for example after a kernel has updated both."""
        self._fingerprints = fingerprints(self.params)

    def release(self) -> None:
        """Free the memory of loaded masters without saving, unless their values are stored nowhere else."""
        if not self._unsaved:
            self.flat.untyped_storage().resize_(0)
            self.allocated = False

    def values(self) -> list[Tensor]:
        """Return one float32 tensor per parameter, for a state dict."""
        loaded = self.allocated
        self.load()
        flat = self.flat.clone()
        if not loaded:
            self.release()
        return self.tensors_on(flat)

    def moved(self) -> bool:
        """Return whether a parameter has moved to another device; raise if one has another dtype now."""
        for p in self.params if {*map(_dtype_of, self.params)} != {self.dtype} else ():
            if p.dtype != self.dtype:
                raise RuntimeError(
                    f"a parameter of shape {tuple(p.shape)} was {self.dtype} when its optimizer got master weights and"
                    f" is {p.dtype} now. Cast the model before its optimizer gets masters. Lightning's pruning puts"
                    " float32 weights back. Use `ModelPruning('l1_unstructured', use_lottery_ticket_hypothesis=False)`."
                )
        return {*map(_device_of, self.params)} != {self.device}


@final
class Fp32Store(Store):
    """A float32 master beside every parameter (Micikevicius et al., arXiv 1710.03740, sec. 3.1)."""

    form = "fp32"
    dtypes = (torch.float16, torch.bfloat16)

    def settle(self, step: int) -> None:
        """Follow edits of the parameters; the masters are always in memory."""
        self.load()

    def unseen_edits(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parameters without a noted edit, and whether one of 64 values differs from its master (a bool tensor).

        A write in place through ``.data`` leaves no trace; the next step undoes it.
        """
        now = fingerprints(self.params)
        for p, view, saved, found in zip(self.params, self.views, self._fingerprints, now, strict=True):
            local = local_tensor(p).detach()
            if found == saved and local.is_contiguous() and view.is_contiguous():
                every = max(1, local.numel() // 64)
                weight, master = (values.view(-1)[::every][:64] for values in (local, view))
                yield p, ((weight != master.to(weight.dtype)) & (weight == weight)).any()  # NaN is no edit

    def values(self) -> list[Tensor]:
        """Return the masters themselves, not copies, as all tensors in a state dict."""
        self.load()
        return self.tensors_on(self.flat)

    def _round(self, step: int) -> None:
        """Keep the exact masters; the copy into the parameters rounds to nearest even."""


@final
class RemainderStore(Store):
    """The exact float32 master as the bf16 parameter and an int16; weights round ties away from zero.

    An edit of a parameter from outside is kept exactly. The remainder stays, so the master lies within half a step of
    the edited value: the store cannot know which elements were edited, and dropping all remainders would lose updates.
    """

    form = "remainder"
    remainder: Tensor

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values; they stay in memory until a step has been saved."""
        self.remainder = torch.zeros(self.flat.shape, dtype=torch.int16, device=self.device)
        self.companions = self.views_on(self.remainder)
        if values:
            super().set_values(values)
        else:
            self._unsaved = False
            self.release()

    @torch.no_grad()
    def value(self, index: int) -> Tensor:
        """Return a copy of the float32 value of one parameter, without loading the others."""
        if self.allocated:
            return super().value(index)
        rest = self.companions[index]
        value = torch.empty_like(rest, dtype=torch.float32).copy_(local_tensor(self.params[index]))
        rounding.join_(*(t.as_strided((t.numel(),), (1,)) for t in (value, rest)))
        return with_local_tensor(value, self.params[index])

    def _fill(self) -> None:
        copy_all_(self.views, [*map(local_tensor, self.params)])
        rounding.join_(self.flat, self.remainder)

    def _round(self, step: int) -> None:
        rounding.split_(self.flat, self.remainder)
        self._unsaved = False


@final
class StochasticStore(Store):
    """Store nothing besides the parameters, and round updates stochastically."""

    form = "stochastic"

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take nothing: the weights are the masters."""
        self.release()

    def arrive(self, values: Mapping[int, Tensor]) -> None:
        """Take nothing."""

    def _round(self, step: int) -> None:
        parts = [self.flat]
        if not self._in_line:
            sizes = [view.numel() for view in self.views]
            parts = [self.flat[at : at + size] for (*_, at), size in zip(self._layout, sizes, strict=True)]
        for index, part in enumerate(parts):
            rounding.stochastic_round_(part, seed=self.seed, step=step, start=self.positions[index])


STORES: Final = {store.form: store for store in (Fp32Store, RemainderStore, StochasticStore)}


@final
class Group:
    """Parameters of one group of the optimizer, dtype and device: their weights, masters, moments and gradients.

    ``index`` is that of the optimizer's group. Float32 parameters have no stores: they are their own masters.
    """

    def __init__(
        self, index: int, params: Sequence[Tensor], masters: Sequence[Tensor], stores: Sequence[Store]
    ) -> None:
        self.index, self.params, self.masters, self.stores = index, params, masters, stores
        self.ids = set(map(id, params))
        self.sharded = any(hasattr(p, "to_local") for p in params)
        self.table: object = None  # what the kernel has noted of the parameters, see `kernel_step.py`

    def changed(self) -> bool:
        """Return whether a parameter has moved or become half precision since the masters were made."""
        for store in self.stores:
            if store.moved():
                return True
        return not self.stores and not set(map(_dtype_of, self.params)).isdisjoint(HALF_DTYPES)


def steps_of(optimizer: Optimizer) -> int:
    """Return the number of steps so far, for the random bits of stochastic rounding."""
    return int(optimizer.param_groups[0].get(ROUNDING_STEP, 0))
