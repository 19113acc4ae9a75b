"""Weights kept as codes under DDP: the same on every rank, their FP8 gradients averaged once per step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_lowprec.msamp.weight import msamp_state_of
from lightning_lowprec.references import alive


def process_group_exists() -> bool:
    """Whether this process trains with others, or could."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def several_ranks() -> bool:
    """Whether this process trains with others."""
    return process_group_exists() and torch.distributed.get_world_size() > 1


class DDPModels:
    """The models under DDP whose weights are kept as codes."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._modules: list[weakref.ref[DistributedDataParallel]] = []
        self._stepping = self._averaged = False

    def exclude_codes(self, module: nn.Module, *, will_train: bool) -> None:
        """Before DDP wraps ``module``, if it will train: DDP shall ignore the weights that are codes.

        Raises:
            ValueError: nothing would be left for DDP to train, which it refuses.
        """
        from lightning_lowprec.msamp.ddp import exclude_from_ddp

        exclude_from_ddp(module)
        trained = {fqn: p for fqn, p in module.named_parameters() if p.requires_grad}
        coded = [fqn for fqn, p in trained.items() if msamp_state_of(p) is not None]
        if will_train and process_group_exists() and coded and len(coded) == len(trained):
            fqn = coded[-1].rpartition(".")[0]
            raise ValueError(
                f"`precision={self._precision!r}`: every trainable parameter of {type(module).__name__} would be kept"
                " as codes, and DDP wants at least one that is not. Keep a layer in high precision:"
                f" `MSAMP(..., keep=[{fqn!r}])`."
            )

    def synchronize(self, module: nn.Module, *, always: bool) -> None:
        """A module as the strategy set it up: all ranks get the codes of rank 0, under DDP or ``always``."""
        from lightning_lowprec.msamp.ddp import broadcast_codes

        if isinstance(module, DistributedDataParallel):
            self._modules = [weakref.ref(m) for m in (*alive(self._modules), module)]
            broadcast_codes(module, module.process_group)
        elif always and several_ranks():
            broadcast_codes(module)

    def check_registered(self, optimizer: Optimizer) -> None:
        """Raise if several processes train codes and no module under DDP was seen.

        Raises:
            RuntimeError: nobody called :meth:`synchronize`.
        """
        coded = any(msamp_state_of(p) is not None and p.requires_grad for p in _params(optimizer))
        if coded and several_ranks() and not alive(self._modules):
            raise RuntimeError(
                f"`precision={self._precision!r}` needs to see the DDP module, and did not. In Fabric, `import"
                " lightning_lowprec` before it is made and set the model up with `fabric.setup`."
            )

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of the weights that ``optimizer`` holds over the ranks; those that are, stay."""
        from lightning_lowprec.msamp.ddp import average_scaled_gradients

        if self._averaged:
            return
        self._averaged = self._stepping
        held = set(map(id, _params(optimizer)))
        for module in alive(self._modules):
            if torch.distributed.get_world_size(module.process_group) > 1:
                average_scaled_gradients([p for p in module.parameters() if id(p) in held], module.process_group)

    @contextmanager
    def averaging_once(self) -> Iterator[None]:
        """Around a step: within it gradients are averaged once, whoever asks again (clipping does)."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = self._averaged = False

    def __getstate__(self) -> dict[str, object]:
        """Modules stay in their process."""
        return {**self.__dict__, "_modules": []}


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
