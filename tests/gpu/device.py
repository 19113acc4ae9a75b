"""Where these tests run, and which names: on a CUDA device with FP8, or, to try the tests themselves, on CPU.

With ``LOWPREC_NO_VALUES=1`` the device computes nothing: every assertion about values ends in ``or NO_VALUES``, so that
the tests run to their ends and show what crashes. cuDNN's attention is off then.
"""

import os

import pytest
import torch

from benchmarks.ledger import triton_bytes
from benchmarks.ledger.untuned import take_first_variant
from benchmarks.rivals.values import use_what_the_device_has, values_exist
from lightning_lowprec.hardware import default_device, refusal
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.doctor import availability
from tests.representatives import representatives

DRY = os.environ.get("LOWPREC_GPU_TESTS_ON") == "cpu"
"""A dry run: the tests' code on CPU, where FP8 is emulated; what only a GPU can show is skipped."""
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)
NO_VALUES = not values_exist()
"""Whether assertions about values hold whatever is found."""
on_gpu_only = pytest.mark.skipif(DRY, reason="a dry run on CPU cannot show this")


def reason_to_skip() -> str | None:
    device = default_device()
    if DRY:
        return None
    return refusal("tensorwise", device) if device.type == "cuda" else f"{device.type} has no FP8 kernels"


REHEARSED = ("fp8-hybrid-fp16", "fp8-hybrid-te")
"""Where nothing is computed these stand for all: tests/ledger/test_every_name.py trains each name there."""
FP8_NAMES = [
    name
    for name in representatives()
    if TABLE[name].plugin.__name__.startswith("FP8") and (name in REHEARSED or not NO_VALUES)
]


def runs_here(name: str) -> str | None:
    verdict = availability(name, DEVICE)
    return None if verdict.runs else verdict.reason


use_what_the_device_has()
if NO_VALUES and not DRY:
    take_first_variant()
    triton_bytes.start()  # for one cache of kernels with tests/ledger
