"""Our Triton kernels by Triton's interpreter: their own code, executed on CPU tensors. `make test-te` runs them."""

import sys
from importlib.util import find_spec

import pytest

KERNELS = ("lightning_lowprec.masters.kernel", "lightning_lowprec.numerics.kernels")
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    from lightning_lowprec.masters import kernel_step
    from lightning_lowprec.masters import step as masters_step

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name in KERNELS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import triton

    monkeypatch.setattr(triton.language, "max", triton.jit(triton.language.max.fn))  # else it was compiled at import
    for module in (masters_step, kernel_step):
        monkeypatch.setattr(module, "DEVICES", {"cpu"})
    yield
    for name in KERNELS:
        sys.modules.pop(name, None)


@pytest.fixture
def launches(monkeypatch):
    from lightning_lowprec.masters import kernel_step

    seen, launch = [], kernel_step.launch

    def noted(rows, *args):
        seen.append([row.variant for row in rows])
        launch(rows, *args)

    monkeypatch.setattr(kernel_step, "launch", noted)
    return seen
