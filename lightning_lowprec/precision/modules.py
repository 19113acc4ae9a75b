"""The modules that a plugin has set up, and their device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import final

import torch
from torch.nn import Module

from lightning_lowprec.hardware import default_device
from lightning_lowprec.precision.host import device_of
from lightning_lowprec.references import alive


@final
class Modules:
    """The modules of one plugin, from their set-up to the check of their optimizers.

    A module is prepared (converted, cast) as soon as the device is known. The first of these sources gives the device:

    1. the strategy: :meth:`bind`, before any module is moved;
    2. the parameters of the first module: at once if they will not be moved any more, else at the first forward;
    3. the device that Lightning would choose, if a forward runs without any module.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.sharded: weakref.WeakSet[Module] | None = None
        """The modules that FSDP2 has sharded; None: this plugin does not run under FSDP2."""
        self.ready = False
        """Whether the device is known and no module waits."""
        self.need_check = False
        """Whether a module was prepared since the last check of optimizers, even if this module no longer exists."""
        self.watched_forwards = 0
        """How many of the next training forwards look for large products in float32 (``float32_products.py``)."""
        self.said_share = False
        """Whether the share of the FLOPs in converted layers was logged since the last set-up."""
        self._waiting: list[weakref.ref[Module]] = []
        self._prepared: list[weakref.ref[Module]] = []
        self._unchecked: list[weakref.ref[Module]] = []

    def bind(self, device: torch.device) -> None:
        """Set the device that the modules will run on."""
        self.device = device
        self.ready = not self._waiting

    def bind_fsdp2(self) -> None:
        """Note that FSDP2 will shard the modules."""
        self.sharded = weakref.WeakSet() if self.sharded is None else self.sharded

    def note_sharded(self, module: Module) -> None:
        """Note that FSDP2 has sharded ``module``."""
        self.sharded = weakref.WeakSet([*(self.sharded or ()), module])

    def is_sharded(self, module: Module) -> bool:
        """Return whether FSDP2 has sharded ``module`` for this plugin."""
        return module in (self.sharded or ())

    def add(self, module: Module) -> bool:
        """Add a module that waits for its preparation; return whether the device is known and preparation can begin."""
        self._waiting.append(weakref.ref(module))
        self.ready = False
        may_still_move = default_device().type != "cpu" and device_of(module).type == "cpu"
        return self.device is not None or not may_still_move

    def take_waiting(self) -> Iterator[tuple[Module, torch.device]]:
        """Yield every waiting module with its device; note a module as prepared when the caller asks for the next."""
        waiting, self._waiting = self._waiting, []
        for module in alive(waiting):
            self.device = self.device or device_of(module)
            yield module, self.device
            self._prepared = [weakref.ref(m) for m in (*alive(self._prepared), module)]
            self._unchecked.append(weakref.ref(module))
            self.need_check = True
            self.watched_forwards += 2
            self.said_share = False
        self.device = self.device or default_device()
        self.ready = True

    @property
    def waiting(self) -> list[Module]:
        """The modules that were set up and are not prepared yet."""
        return alive(self._waiting)

    @property
    def prepared(self) -> list[Module]:
        """The modules that are prepared."""
        return alive(self._prepared)

    @property
    def unchecked(self) -> list[Module]:
        """The modules whose optimizers have not been checked since they were prepared."""
        return alive(self._unchecked)

    def note_check(self) -> None:
        """Note that the optimizers of every prepared module have been checked."""
        self._unchecked = []
        self.need_check = False

    def __getstate__(self) -> dict[str, object]:
        """Leave out the modules, which stay in their process."""
        left_out: dict[str, object] = {"_waiting": [], "_prepared": [], "_unchecked": [], "sharded": None}
        return {**self.__dict__, **left_out, "ready": self.device is not None, "need_check": False}
