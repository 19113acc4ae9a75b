"""Kernels take inputs and gradients of every dense layout: torch checks operands here as on a GPU."""

import pytest

from tests.contract.layouts import LAYERS, NAMES, PLUGINS, results

ON_HOPPER = [name for name in NAMES if name != "mxfp8"]
AS_ANOTHER = {
    "fp8-hybrid-fp16": "fp8-hybrid", "fp8-hybrid-remainder": "fp8-hybrid", "msamp-o1": "msamp-o2",
    "msamp-o3": "msamp-o2", "grad_weight in bf16": "fp8-rowwise-gw-hp", "forward in bf16": "fp8-rowwise-gw-hp",
}  # fmt: skip
"""What has the operands of the other one: `make test-ledger` shows it with one kind of layer."""


def all_of_both():
    for how in (*ON_HOPPER, *PLUGINS):
        for kind in LAYERS:
            rehearsed = how in AS_ANOTHER and kind != "Linear"
            yield pytest.param(how, kind, marks=pytest.mark.rehearsed if rehearsed else ())


@pytest.mark.parametrize(("how", "kind"), list(all_of_both()))
def test_every_layout(how, kind):
    results(how, kind, accelerator="gpu")


@pytest.mark.parametrize(
    "how",
    [
        "fp8-hybrid",
        "msamp-o2",
        "int8-mixed",
        pytest.param("fp8-rowwise", marks=pytest.mark.rehearsed),
    ],
)
def test_every_layout_compiled(how):
    results(how, "Linear", accelerator="gpu", compiled=True)
