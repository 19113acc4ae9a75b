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

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.flat import FlatBuffer, local
from lightning_lowprec.private.torch import copy_all_, version_of


class Store(ABC):
    """The masters of ``params``, which share one device and one half-precision dtype.

    Args:
        params: the parameters; of a DTensor, the local shard.
        values: float32 values by ``id(parameter)``; a value is used if it rounds to its parameter.

    Raises:
        ValueError: the store cannot hold masters of this dtype.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)

    @torch.no_grad()
    def __init__(self, params: Sequence[Tensor], values: Mapping[int, Tensor]) -> None:
        self.params = list(params)
        self.dtype, self.device = params[0].dtype, params[0].device
        if self.dtype not in self.dtypes:
            raise ValueError(
                f"{type(self).__name__} keeps masters of {' or '.join(map(str, self.dtypes))} parameters, got"
                f" {self.dtype}. Cast the model to bfloat16, or use float32 masters."
            )
        self.buffer = FlatBuffer(self.params, torch.float32)
        self.masters = [leaf.requires_grad_() for leaf in self.buffer.tensors]
        self._unsaved = False  # whether the buffer has values that are stored nowhere else
        self._fingerprints: list[tuple[int, int] | None] = [None] * len(self.params)  # None: edited
        self.set_values(values)

    # ---- the form

    @abstractmethod
    def at_rest(self) -> list[Tensor]:
        """Return the tensors that are stored between steps, besides the parameters; some may have no memory."""

    @abstractmethod
    def _round(self, step: int) -> None:
        """Round the buffer to values of the parameters' dtype, and store the difference if the form does so."""

    def _fill(self) -> None:
        """Put the float32 values of all parameters into the (allocated) buffer."""
        copy_all_(self.buffer.views, self._weights())

    @torch.no_grad()
    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values by ``id(parameter)``; a parameter without a value becomes its own master.

        The next load checks whether a value rounds to its parameter: a checkpoint may still change the parameter.
        """
        self.buffer.allocate()
        Store._fill(self)
        for p, view in zip(self.params, self.buffer.views, strict=True):
            if id(p) in values:
                view.copy_(local(values[id(p)]))
        self._clear_fingerprints()
        self._unsaved = True

    # ---- a step

    @torch.no_grad()
    def load(self) -> None:
        """Give every master its value; a master whose parameter was edited follows the edit."""
        if self.buffer.allocated:
            self._follow_edits()
        else:
            self.buffer.allocate()
            self._fill()
            self._save_fingerprints()

    @torch.no_grad()
    def save(self, step: int) -> None:
        """Round the masters into the parameters and free their memory; ``step`` counts the calls."""
        self._round(step)
        self.cast_to_params()
        self._unsaved = False
        self.release()

    @torch.no_grad()
    def cast_to_params(self) -> None:
        """Cast the masters into the parameters; the masters stay loaded, for an evaluation inside a step."""
        copy_all_(self._weights(), self.buffer.views)
        self._save_fingerprints()

    def release(self) -> None:
        """Free the memory of loaded masters without saving, unless their values are stored nowhere else."""
        if not self._unsaved:
            self.buffer.free()

    def refresh(self) -> None:
        """Follow all edits of the parameters, also edits that leave no trace."""
        self._clear_fingerprints()
        self.load()

    def values(self) -> list[Tensor] | None:
        """Return one float32 tensor per parameter for a state dict; None if the parameters contain everything."""
        loaded = self.buffer.allocated
        self.load()
        flat = self._snapshot()
        if not loaded:
            self.release()
        return self.buffer.tensors_on(flat)

    def _snapshot(self) -> Tensor:
        return self.buffer.flat.clone()

    @property
    def version(self) -> int:
        """A count that grows when a master changes."""
        return version_of(self.buffer.flat)

    # ---- the parameters

    def moved(self) -> bool:
        """Return whether a parameter has moved to another device.

        Raises:
            RuntimeError: a parameter has another dtype now.
        """
        changed = [p for p in self.params if p.dtype != self.dtype]
        if changed:
            raise RuntimeError(
                f"a parameter of shape {tuple(changed[0].shape)} was {self.dtype} when its optimizer got master"
                f" weights and is {changed[0].dtype} now. Cast the model before its optimizer gets masters."
            )
        return any(p.device != self.device for p in self.params)

    def _weights(self) -> list[Tensor]:
        return [local(p) for p in self.params]

    def _save_fingerprints(self) -> None:
        self._fingerprints = [_fingerprint(p) for p in self.params]

    def _clear_fingerprints(self) -> None:
        self._fingerprints = [None] * len(self.params)

    def _follow_edits(self) -> None:
        for p, view, saved in zip(self.params, self.buffer.views, self._fingerprints, strict=True):
            if _fingerprint(p) != saved:
                view.copy_(rounding.reconcile(view, local(p).to(view.device)))
        self._save_fingerprints()


class Fp32Store(Store):
    """A float32 master beside every parameter (Micikevicius et al., arXiv 1710.03740, sec. 3.1)."""

    dtypes = (torch.float16, torch.bfloat16)

    def at_rest(self) -> list[Tensor]:
        """The masters."""
        return [self.buffer.flat]

    def _round(self, step: int) -> None:
        """Nothing to do: the copy into the parameters rounds to nearest even, and the masters are stored exactly."""

    def release(self) -> None:
        """Nothing to free: the buffer is stored between steps."""

    def _snapshot(self) -> Tensor:
        return self.buffer.flat  # not a copy, as all tensors in a state dict


class RemainderStore(Store):
    """The exact float32 master as the bf16 parameter and an int16; weights round ties away from zero.

    An edit of a parameter from outside is kept exactly. The remainder stays, so the master lies within half a step of
    the edited value: the store cannot know which elements were edited, and dropping all remainders would lose updates.
    """

    remainder: Tensor

    def at_rest(self) -> list[Tensor]:
        """Return the remainders, and the masters: these have memory from :meth:`set_values` to the next step."""
        return [self.remainder, self.buffer.flat]

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values; they stay in memory until a step has been saved."""
        self.remainder = torch.zeros(self.buffer.flat.shape, dtype=torch.int16, device=self.device)
        if values:
            super().set_values(values)
        else:
            self.buffer.free()
            self._unsaved = False

    def refresh(self) -> None:
        """Every master becomes its parameter."""
        self.set_values({})

    def _fill(self) -> None:
        super()._fill()
        rounding.join_(self.buffer.flat, self.remainder)

    def _round(self, step: int) -> None:
        rounding.split_(self.buffer.flat, self.remainder)


class StochasticStore(Store):
    """Store nothing besides the parameters, and round updates stochastically.

    Args:
        params: bf16 parameters.
        values: unused, because the weights are the masters.
        seed: the seed of the run; the random bits depend on the seed, the step and the position only.
        start: the position of the first element among the elements of all stores of the optimizer.
    """

    def __init__(self, params: Sequence[Tensor], values: Mapping[int, Tensor], *, seed: int, start: int) -> None:
        self._seed, self._start = seed, start
        super().__init__(params, values)

    def at_rest(self) -> list[Tensor]:
        """Return the buffer, which has no memory between steps."""
        return [self.buffer.flat]

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take nothing: the weights are the masters."""
        self.buffer.free()

    def refresh(self) -> None:
        """Free the masters; every load reads the parameters."""
        self.buffer.free()

    def values(self) -> None:
        """Return None: the parameters contain everything."""

    def _round(self, step: int) -> None:
        rounding.stochastic_round_(self.buffer.flat, seed=self._seed, step=step, start=self._start)


def _fingerprint(param: Tensor) -> tuple[int, int]:
    """Return a value that changes with every edit of ``param``, except in-place edits of ``param.data``."""
    return version_of(param), local(param).data_ptr()
