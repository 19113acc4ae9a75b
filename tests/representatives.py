"""The names that stand for others in tests that cost more than milliseconds."""

from collections.abc import Iterable
from typing import Any

from lightning_lowprec import FP8TE
from lightning_lowprec.conversion.name_formats import MASTERS, split
from lightning_lowprec.names import OF_LIGHTNING as OF_LIGHTNING
from lightning_lowprec.names import TABLE
from lightning_lowprec.private.torchao import prototype_refusal

WITH_MASTERS = {
    *("fp8-rowwise-remainder", "fp8-hybrid-remainder", "fp8-e4m3-8bit", "fp8-rowwise-gw-hp-sr"),
    *("fp8-block-te-remainder", "fp8-hybrid-te-remainder", "fp8-e4m3-te-8bit", "fp8-current-te-sr"),
}
"""Of FP8TorchAO and of FP8TE, each form of masters once, and each over another recipe."""


def representatives(names: Iterable[str] | None = None) -> list[str]:
    """Return the names of the table, but of the FP8 names with a suffix of bf16 weights only a few.

    ``tests/registration/test_names.py`` tests the rule that makes all of them: their plugins differ from these in
    ``recipe`` and ``fp8_format`` only.
    """
    table = TABLE if names is None else names
    return [
        name for name in table if name in WITH_MASTERS or not (split(name)[1] in MASTERS and split(name)[0] in TABLE)
    ]


def names_on_cpu() -> list[str]:
    """The names that train on a CPU without Transformer Engine; of names that mean the same plugin, one.

    MXFP8 by torchao needs a newer torchao than the oldest that is supported, where a test holds the refusal.
    """
    return once(
        name
        for name, row in TABLE.items()
        if row.plugin is not FP8TE and not (row.hardware_recipe == "torchao-mxfp8" and prototype_refusal("mxfp8"))
    )


def once(names: Iterable[str]) -> list[str]:
    """Return the names without those that mean the same plugin as an earlier one."""
    plugins: list[Any] = []
    chosen = []
    for name in names:
        plugin = TABLE[name].plugin, TABLE[name].options
        if plugin not in plugins:
            plugins.append(plugin)
            chosen.append(name)
    return chosen
