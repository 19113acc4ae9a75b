"""The real Transformer Engine on a machine without a GPU: `make test-te`.

Its modules ask one question before they construct, whether CUDA is available; ``pretend_gpu`` answers it. Nothing else
is replaced. Its kernels cannot run here; its ONNX forward, plain torch, can, and so can its own forward and backward
with the quantizers in plain torch that it ships (``reference_te``; see ``reference.py``).
"""

import os
from importlib.util import find_spec

import pytest
import torch

os.environ["NVTE_TORCH_COMPILE"] = "0"  # read at import: its torch code for scales runs eagerly, not through inductor

NEEDS_IT = ["test_te_*.py"]
collect_ignore_glob = [] if find_spec("transformer_engine") else NEEDS_IT


@pytest.fixture
def pretend_gpu(monkeypatch):
    from tests.te.reference import pretend

    pretend(monkeypatch)


@pytest.fixture
def reference_te(monkeypatch):
    from tests.te.reference import run_on_cpu

    run_on_cpu(monkeypatch)


@pytest.fixture
def onnx_forward(monkeypatch):
    """Transformer Engine's modules compute by torch operations on CPU, in high precision, without gradients."""
    from transformer_engine.pytorch.export import onnx_export

    from tests.te.reference import take_any_input

    take_any_input(monkeypatch)

    def warm(model):
        for module in model.modules():
            module.forwarded_at_least_once = True  # it asks for a forward by its kernels first
        return model

    with onnx_export(True), torch.no_grad():
        yield warm
