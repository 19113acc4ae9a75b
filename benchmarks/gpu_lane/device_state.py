"""In what state the GPU was while steps were timed (clocks, power, temperature), and which attention torch chose."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu_lane import models

FIELDS = {
    "clocks.sm": "sm_mhz", "clocks.max.sm": "sm_max_mhz", "clocks.mem": "memory_mhz", "power.draw": "watts",
    "power.limit": "watts_limit", "temperature.gpu": "celsius",
}  # fmt: skip
"""``nvidia-smi``'s fields, and ours."""
EVERY_MS = 200


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Ask ``nvidia-smi`` again and again while the body runs; the dictionary is filled when the body has ended.

    It has the medians by field, ``sm_mhz_min``, ``watts_max`` and the number of samples; nothing without
    ``nvidia-smi``, and ``failed`` with its words if it answers no numbers.
    """
    found: dict[str, Any] = {}
    if device.type != "cuda" or shutil.which("nvidia-smi") is None:
        yield found
        return
    command = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
    command.append(f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield found
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=10)
        found |= parse(output)


def parse(output: str) -> dict[str, Any]:
    """What ``nvidia-smi`` printed, as numbers."""
    rows = []
    for line in output.splitlines():
        try:
            row = [float(value) for value in line.split(",")]
        except ValueError:
            continue
        rows += [row] if len(row) == len(FIELDS) else []
    if not rows:
        return {"failed": " ".join(output.split())[:200] or "nvidia-smi printed nothing"}
    columns = dict(zip(FIELDS.values(), zip(*rows, strict=True), strict=True))
    medians = {name: statistics.median(values) for name, values in columns.items()}
    return {**medians, "sm_mhz_min": min(columns["sm_mhz"]), "watts_max": max(columns["watts"]), "samples": len(rows)}


def attention_backend(shape: models.Shape, batch: int, device: torch.device) -> str:
    """The backend that torch chooses for the block's attention in bf16, such as ``"CUDNN_ATTENTION"``."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        torch.empty(batch, count, shape.sequence, shape.head_dim, device=device, dtype=torch.bfloat16)
        for count in heads
    )
    q.requires_grad_()
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True)
    return {int(backend): name for name, backend in SDPBackend.__members__.items()}.get(chosen, str(chosen))
