"""A device that computes nothing: it records launches, hands out memory and leaves every value as it was.

``python -m benchmarks.gpu`` and ``tests/gpu`` run to their ends there, which finds every crash in Python before there
is a GPU. Whatever follows from values or from time is off, and cuDNN and NCCL, which such a device lacks, are not used.
"""

from __future__ import annotations

import os

import torch
from torch import distributed as dist

NO_VALUES = "LOWPREC_NO_VALUES"
"""Environment variable: any text but an empty one or ``0`` says that the device computes nothing."""


def values_exist() -> bool:
    """Return whether tensors hold what was computed, and time passes as on a real device."""
    return os.environ.get(NO_VALUES, "") in ("", "0")


def use_what_the_device_has() -> None:
    """Turn cuDNN attention off where nothing computes: torch would choose it, and it has no library there."""
    if not values_exist():
        torch.backends.cuda.enable_cudnn_sdp(False)


def stand_in_for_nccl(device: torch.device, *, real: bool = False) -> None:
    """Make a group where NCCL cannot work because nothing computes; do nothing elsewhere.

    Lightning's strategies take a group that is there, and make their own otherwise. The group is torch's fake one,
    under which everything runs as under NCCL. A ``real`` one is gloo's, for what the fake one cannot do: average
    gradients for DDP, send objects for sharded checkpoints.
    """
    if device.type != "cuda" or values_exist() or dist.is_initialized():
        return
    if real:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
