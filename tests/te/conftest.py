"""Tests against the real Transformer Engine, on a machine without a GPU: `make test-te`.

It refuses to construct its modules without CUDA and asks ``torch.cuda.is_available()``: that one answer is changed, and
nothing else. Its ONNX path is plain torch and computes (and differentiates) on CPU; its kernels are for ``tests/gpu``.
"""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Let Transformer Engine construct."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
