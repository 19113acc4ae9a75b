"""Profile a few steps of a contender that has been measured, and keep the trace of a few of them.

All traces lie in one archive of the output folder, ``traces.zip``: few files come back from a GPU machine. Each opens
in https://ui.perfetto.dev or ``chrome://tracing``.
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_lane import kernel_times, measure

ARCHIVE = "traces.zip"
TRACED_STEPS = 2
"""Steps of a contender whose trace is kept, with the host's operations; of others one, the GPU's kernels alone."""


def profiled(step: Callable[[], Any], device: torch.device, *, keep: tuple[Path, str] | None) -> dict[str, Any]:
    """Run and profile some steps; the figures of ``kernel_times.summary``, or the reason why there are none.

    Args:
        step: a warm training step.
        device: a CUDA device; on others nothing is run, because there are no kernels.
        keep: the output folder and the name under which the trace goes to its archive; None: it is not kept.
    """
    if device.type != "cuda":
        return {}
    steps = 1 if keep is None else TRACED_STEPS
    activities = [ProfilerActivity.CUDA] if keep is None else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    try:
        with profile(activities=activities) as found:
            for _ in range(steps):
                step()
            torch.cuda.synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            text = path.read_text(errors="replace")
        if keep is not None:
            archive(*keep, text)
        return kernel_times.summary(json.loads(text), steps)
    except Exception as error:  # the step's own figures are there already
        return {"failed": measure.describe(error)}


def archive(folder: Path, name: str, text: str) -> None:
    """Put a trace into the folder's archive; one of this name is replaced."""
    path = folder / ARCHIVE
    member = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"
    kept: dict[str, bytes] = {}
    if path.exists():
        with zipfile.ZipFile(path) as old:
            kept = {other: old.read(other) for other in old.namelist() if other != member}
    kept[member] = text.encode()
    fresh = folder / f".{ARCHIVE}"
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as new:
        for other, content in kept.items():
            new.writestr(other, content)
    fresh.replace(path)
