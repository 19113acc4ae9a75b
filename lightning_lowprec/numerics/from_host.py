"""Bring numbers of the host to a device without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lowprec.numerics.triton_runs import is_simulated


def tensor_on(device: torch.device, numbers: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return ``numbers`` as a tensor on ``device``: (len(numbers),) of ``dtype``.

    ``torch.tensor(numbers, device="cuda")`` copies from pageable memory, and the host waits until all work of the
    stream has ended. This copy is from pinned memory.
    """
    on_host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda" and not is_simulated())
    return on_host.to(device, non_blocking=True)
