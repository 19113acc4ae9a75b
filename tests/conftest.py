"""What one test leaves behind must not reach the next."""

import gc
import os
import sys

import pytest
import torch


def pytest_collection_finish() -> None:
    """Hide from the garbage collector what the imports made: it would look at all of that in every collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def own_compiler():
    """Compiled code of other files counts towards the limits of the compiler: all layers share one forward."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def own_environment():
    """Lightning writes LOCAL_RANK and the like into the environment; a script started later would wait for ranks."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
