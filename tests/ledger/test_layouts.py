"""Kernels take inputs and gradients of every dense layout: torch checks operands here as on a GPU."""

import pytest

from tests.contract.layouts import LAYERS, NAMES, PLUGINS, results

ON_HOPPER = [name for name in NAMES if name != "mxfp8"]


@pytest.mark.parametrize("how", [*ON_HOPPER, *PLUGINS])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_layout(how, kind):
    results(how, kind, accelerator="gpu")


@pytest.mark.parametrize("how", ["fp8-hybrid", "fp8-rowwise", "msamp-o2", "saved_inputs='codes'", "int8-mixed"])
def test_every_layout_compiled(how):
    results(how, "Linear", accelerator="gpu", compiled=True)
