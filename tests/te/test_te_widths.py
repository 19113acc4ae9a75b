"""The rows of Transformer Engine's names in `lowprec plan --precisions`, against its recipes and against FSDP2."""

import pytest

from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import gathers_fp8
from lightning_lowprec.names import TABLE, create
from lightning_lowprec.te.plugin import FP8TE
from lightning_lowprec.tools.planning.pages import widths

NAMES = [name for name, entry in TABLE.items() if entry.plugin is FP8TE]


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_those_of_the_recipe(name):
    plugin = create(name)
    chosen = getattr(plugin.recipe, "fp4_format", plugin.recipe.fp8_format).name
    forward, backward = {
        "E2M1": ("e2m1", "e2m1"), "E4M3": ("e4m3", "e4m3"), "HYBRID": ("e4m3", "e5m2, e4m3"),
    }[chosen]  # fmt: skip
    row = widths(name)
    assert (row["output"], row["grad_input"], row["grad_weight"]) == (forward, backward, backward)
    assert not gathers_fp8(plugin, ShardOptions())
    assert row["fsdp2"] == plugin.base
