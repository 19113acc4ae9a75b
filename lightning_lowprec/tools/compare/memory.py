"""Peak memory of a stretch of a run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

CUDA_KIND = "most bytes allocated by torch on the GPU during fit (torch.cuda.max_memory_allocated)"
CPU_KIND = "peak resident memory of the process during fit, less what was resident just before fit"
UNKNOWN_KIND = "not measured: this system has no /proc to read it from"

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): resets VmHWM to the current resident size


class PeakMemory:
    """Measures from `start` to `read`: what the GPU allocated, or what the process grew by."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before: int | None = None

    def start(self) -> None:
        """Forget earlier peaks."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
            self._before = _status("VmRSS")
        except OSError:
            self._before = None

    def read(self) -> tuple[int | None, str]:
        """Bytes, or None, and in words what they are."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), CUDA_KIND
        if self._before is None:
            return None, UNKNOWN_KIND
        return _status("VmHWM") - self._before, CPU_KIND


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"{STATUS} has no {field}")
    return int(found[1]) * 1024
