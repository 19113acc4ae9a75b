"""These tests are marked ``gpu`` and skip by themselves without a CUDA device that has FP8."""

import gc
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE, DRY, reason_to_skip

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = reason_to_skip() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        # the compilers, NCCL and the versions on that machine warn of things that are not ours
        item.add_marker(pytest.mark.filterwarnings("default"))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fresh_device():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    gc.collect()
    if not DRY:
        gc.freeze()  # what stays is not looked at again after every test
        torch.cuda.synchronize(DEVICE)
        torch.cuda.empty_cache()
