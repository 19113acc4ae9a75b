"""Where the float32 values of half-precision parameters live between optimizer steps.

| store | parameters | extra bytes at rest | what an update below half a step of the dtype does |
|---|---|---|---|
| ``Fp32Store`` | fp16, bf16 | 4 | adds up in the master |
| ``RemainderStore`` | bf16 | 2 | adds up, bit for bit the same |
| ``StochasticStore`` | bf16 | 0 | moves the weight with a probability, right on average |

A store holds the parameters of one device and dtype. Their masters are views of one flat float32 buffer, made once:
loading and saving are one multi-tensor copy plus arithmetic on the flat buffer, however many parameters there are,
and giving the memory back is one resize of the buffer's storage, so optimizer state may be keyed by the masters.
A master must not be read between :meth:`Store.release` and :meth:`Store.load`: it has no memory then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.flat import FlatBuffer, local


class Store(ABC):
    """The masters of ``params``, which share one device and one half-precision dtype.

    Args:
        params: the parameters; DTensors are handled by their local shards.
        values: float32 values by ``id(parameter)`` where they are known; used where they round to the parameter.

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
        self._unsaved = False  # values that only the buffer has
        self._seen: list[tuple[int, int] | None] = [None] * len(self.params)
        self.set_values(values)

    # ---- what a store defines

    @abstractmethod
    def at_rest(self) -> list[Tensor]:
        """What it holds in memory between steps, beside the parameters."""

    @abstractmethod
    def _round(self, step: int) -> None:
        """Make the buffer's values ones of the parameters' dtype, and keep what that loses."""

    def _fill(self) -> None:
        """Put the float32 values of all parameters into the (allocated) buffer."""
        torch._foreach_copy_(self.buffer.views, self._weights())

    @torch.no_grad()
    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values (by ``id(parameter)``), where known; a parameter without one is its own.

        Whether a value rounds to its parameter is found out at the next load: the parameter may still be loaded.
        """
        self.buffer.allocate()
        Store._fill(self)
        for p, view in zip(self.params, self.buffer.views, strict=True):
            if id(p) in values:
                view.copy_(local(values[id(p)]))
        self._forget_weights()
        self._unsaved = True

    # ---- a step

    @torch.no_grad()
    def load(self) -> None:
        """Give every master its value; one whose parameter was edited since follows the edit."""
        if self.buffer.allocated:
            self._follow_edits()
        else:
            self.buffer.allocate()
            self._fill()
            self._note_weights()

    @torch.no_grad()
    def save(self, step: int) -> None:
        """Round the masters into the parameters and give their memory back; ``step`` counts the calls."""
        self._round(step)
        self.cast_to_params()
        self._unsaved = False
        self.release()

    @torch.no_grad()
    def cast_to_params(self) -> None:
        """Cast the masters into the parameters and keep them loaded: for an evaluation inside a step."""
        torch._foreach_copy_(self._weights(), self.buffer.views)
        self._note_weights()

    def release(self) -> None:
        """Give the memory of loaded masters back without saving, unless it holds values that nothing else has."""
        if not self._unsaved:
            self.buffer.free()

    def refresh(self) -> None:
        """Follow the parameters, whether or not their edits were noticed."""
        self._forget_weights()
        self.load()

    def values(self) -> list[Tensor] | None:
        """A float32 tensor per parameter, in a state dict the ``master_param``; None if the parameters are all."""
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
        """Moves when a master does."""
        return self.buffer.flat._version

    # ---- the parameters

    def moved(self) -> bool:
        """Whether a parameter is on another device by now.

        Raises:
            RuntimeError: a parameter has another dtype by now.
        """
        changed = [p for p in self.params if p.dtype != self.dtype]
        if changed:
            raise RuntimeError(
                f"a parameter of shape {tuple(changed[0].shape)} was {self.dtype} when its optimizer got master"
                f" weights and is {changed[0].dtype} now. Cast the model first, then build and wrap the optimizer."
            )
        return any(p.device != self.device for p in self.params)

    def _weights(self) -> list[Tensor]:
        return [local(p) for p in self.params]

    def _note_weights(self) -> None:
        self._seen = [_fingerprint(p) for p in self.params]

    def _forget_weights(self) -> None:
        self._seen = [None] * len(self.params)

    def _follow_edits(self) -> None:
        for p, view, seen in zip(self.params, self.buffer.views, self._seen, strict=True):
            if _fingerprint(p) != seen:
                view.copy_(rounding.reconcile(view, local(p).to(view.device)))
        self._note_weights()


class Fp32Store(Store):
    """A float32 master beside every parameter (Micikevicius et al., arXiv 1710.03740, sec. 3.1)."""

    dtypes = (torch.float16, torch.bfloat16)

    def at_rest(self) -> list[Tensor]:
        """The masters."""
        return [self.buffer.flat]

    def _round(self, step: int) -> None:
        """The copy into the parameters rounds to nearest even; the masters stay as they are."""

    def release(self) -> None:
        """The buffer is what this store keeps."""

    def _snapshot(self) -> Tensor:
        return self.buffer.flat  # the live tensor, as every other state in a state dict


class RemainderStore(Store):
    """The exact float32 master as the bf16 parameter and an int16; weights round ties away from zero.

    An edit of a parameter from outside is kept exactly; its master lies within half a step of it, since the remainder
    stays: which elements were edited cannot be told, and dropping all remainders would lose what they add up to.
    """

    remainder: Tensor

    def at_rest(self) -> list[Tensor]:
        """The remainders; the masters too until values that were set have gone through a step."""
        return [self.remainder, self.buffer.flat]

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Take float32 values; they stay in memory as such until a step has been saved."""
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
    """No master: the parameters are all there is, and updates are rounded stochastically.

    Args:
        params: bf16 parameters.
        values: unused: the weights are the masters.
        seed: of the run; the random bits depend on it, the step and the position alone.
        start: position of the first element among those of all stores of the optimizer.
    """

    def __init__(self, params: Sequence[Tensor], values: Mapping[int, Tensor], *, seed: int, start: int) -> None:
        self._seed, self._start = seed, start
        super().__init__(params, values)

    def at_rest(self) -> list[Tensor]:
        """Nothing with memory."""
        return [self.buffer.flat]

    def set_values(self, values: Mapping[int, Tensor]) -> None:
        """Nothing to take: the weights are the masters."""
        self.buffer.free()

    def refresh(self) -> None:
        """The next load reads the parameters, as every load does."""
        self.buffer.free()

    def values(self) -> None:
        """None: the parameters hold all of it."""
        return

    def _round(self, step: int) -> None:
        rounding.stochastic_round_(self.buffer.flat, seed=self._seed, step=step, start=self._start)


def _fingerprint(param: Tensor) -> tuple[int, int]:
    """Changes with every edit of ``param`` but in-place ones of ``param.data``."""
    return param._version, local(param).data_ptr()
