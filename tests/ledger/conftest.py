"""What a GPU is asked to do, on a machine without one: `make test-ledger`.

The tests run in a process on the null GPU (benchmarks/ledger); elsewhere they are not collected. Kernels compute
nothing there, so no test reads a value that a kernel should have written.
"""

import gc
import os
import sys

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.utils import counters

from benchmarks.ledger import triton_bytes
from benchmarks.ledger.recorder import on_null_gpu
from benchmarks.ledger.untuned import take_first_variant
from tests.garbage import leave_what_is_there

collect_ignore_glob = [] if on_null_gpu() else ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "/ledger/" in str(item.path):  # compilers warn of things that are not ours
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def no_cudnn_attention():
    """The null GPU has no cuDNN."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture(autouse=True, scope="module")
def no_scales_of_other_files():
    """Transformer Engine renews the delayed scales of every model that the process ever had."""
    if "transformer_engine" in sys.modules:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()


@pytest.fixture
def fresh():
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.cuda.empty_cache()  # memory of other tests is not zero, and sizes are read from memory
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="session")
def one_variant_of_tuned_kernels():
    """Every variant would be compiled, and none would be faster."""
    take_first_variant()


@pytest.fixture(autouse=True, scope="module")
def one_cache_of_kernels():
    """Kernels with and without bytes would be others."""
    triton_bytes.start()


@pytest.fixture(autouse=True)
def own_environment_of_lightning():
    """Lightning writes LOCAL_RANK; the environment of the null GPU stays."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def garbage_of_this_file():
    """Tests collect garbage before they look at memory: what was there before them is not looked at again."""
    leave_what_is_there()
