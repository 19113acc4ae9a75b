"""Names with and without a backend, and what they say on a machine that cannot run them."""

import re

import lightning as L
import pytest

import lightning_lowprec
from lightning_lowprec import FP8TE
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import gathers_fp8
from lightning_lowprec.names import TABLE, create
from lightning_lowprec.te.layer import te_linears
from tests.te.hopper import pretend
from tests.te.subjects import QUIET, Lit, Net, fabric_for

NAMES = [name for name, entry in TABLE.items() if entry.plugin is FP8TE]


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    for plugin in (
        L.Fabric(precision=name, accelerator="cpu").strategy.precision,
        L.Trainer(precision=name, **QUIET).precision_plugin,
    ):
        assert type(plugin) is FP8TE
        assert plugin.precision == name
        assert (plugin.scaler is not None) == name.endswith("-fp16")
    with_backend = re.sub("^(mxfp8|fp8-block)(?!-te)", r"\1-te", name)
    assert FP8TE(**TABLE[name].options).precision == with_backend


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_is_refused_before_anything_is_touched(name):
    model = Net()
    with pytest.raises(
        RuntimeError, match=rf"`precision='{name}'` cannot run: cpu is no NVIDIA GPU, .* NVIDIA GPUs only"
    ):
        fabric_for(create(name)).setup(model)
    assert not te_linears(model)
    with pytest.raises(RuntimeError, match="fp8-hybrid"):
        L.Trainer(precision=name, **QUIET).fit(Lit())


def test_plugins_and_names_have_the_same_rows_in_the_table_of_what_runs_where():
    for name, row in TABLE.items():
        if row.plugin is FP8TE:
            assert create(name).hardware_recipe == row.hardware_recipe == f"te-{create(name).kind}", name
    plain = {"recipe": "nvfp4", "disable_rht": True, "disable_stochastic_rounding": True}
    assert FP8TE(plain).hardware_recipe == "te-nvfp4-plain"


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-hybrid-fp16"])
def test_a_name_means_the_same_where_both_are_installed(monkeypatch, name):
    pretend(monkeypatch)
    for plugin in (create(name), L.Fabric(precision=name, accelerator="cpu", strategy="fsdp2").strategy.precision):
        assert type(plugin) is lightning_lowprec.FP8TorchAO
        assert plugin.precision == name


def test_a_run_of_the_other_backend_resumes():
    create("fp8-hybrid-fp16").load_state_dict({"backend": "transformer_engine"})
    create("fp8-hybrid").load_state_dict({"backend": "transformer_engine"})


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_plan_have_the_formats_of_the_recipe(name):
    plugin = create(name)
    chosen = getattr(plugin.recipe, "fp4_format", plugin.recipe.fp8_format).name
    forward, backward = {
        "E2M1": ("e2m1", "e2m1"), "E4M3": ("e4m3", "e4m3"), "HYBRID": ("e4m3", "e5m2, e4m3"),
    }[chosen]  # fmt: skip
    row = TABLE[name].formats.row()
    assert (row["output"], row["grad_input"], row["grad_weight"]) == (forward, backward, backward)
    assert not gathers_fp8(plugin, ShardOptions())
    assert row["fsdp2"] == plugin.base
