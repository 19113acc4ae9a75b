"""What one call was asked to do; travels to the worker processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The size of everything follows from these few."""

    device: str = "cpu"
    smoke: bool = False
    """Toy sizes: seconds on a CPU."""
    compile: bool = True
    """Compile what a user would compile; off in ``--smoke`` on CPU, where nothing is timed in earnest."""
    steps: int = 20
    """Training steps of ``step8b``, the first ones included; of ``loss`` in toy sizes."""
    batch: int | None = None
    """Sequences per step; None is what fits the device (see ``sizes``)."""
    seeds: int = 1
    """Runs of each precision of ``loss``: seeds 0, 1 ..."""
    only: tuple[str, ...] = ()
    """Items whose key contains one of these; empty is all."""
    out: str | None = None
    """The output folder, for what is no figure; None keeps the figures only."""

    @property
    def torch_device(self) -> torch.device:
        """``device`` as torch's own type; who only starts workers need not import torch."""
        import torch

        return torch.device(self.device)

    @property
    def cuda(self) -> bool:
        """Whether there is anything to time in earnest."""
        return self.torch_device.type == "cuda"

    def recorded(self) -> dict[str, Any]:
        """What the results keep: everything but where they lie on that machine."""
        return {name: value for name, value in asdict(self).items() if name != "out"}
