"""Names of precisions, and private names of Transformer Engine: what they say where they cannot run or are lost."""

import os
import subprocess
import sys

import lightning as L
import pytest
import torch
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec import FP8TE
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import gathers_fp8
from lightning_lowprec.names import TABLE, create
from lightning_lowprec.private.transformer_engine import check_names, moved
from lightning_lowprec.tools.doctor import availability
from tests.te.reference import QUIET, Lit, Net, fabric_for, te_linears

NAMES = [name for name, entry in TABLE.items() if entry.plugin is FP8TE]


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


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_plan_have_the_formats_and_the_hardware_of_the_recipe(name):
    plugin = create(name)
    assert plugin.hardware_recipe == TABLE[name].hardware_recipe == f"te-{plugin.kind}"
    chosen = getattr(plugin.recipe, "fp4_format", plugin.recipe.fp8_format).name
    forward, backward = {
        "E2M1": ("e2m1", "e2m1"), "E4M3": ("e4m3", "e4m3"), "HYBRID": ("e4m3", "e5m2, e4m3"),
    }[chosen]  # fmt: skip
    row = TABLE[name].formats.row()
    assert (row["output"], row["grad_input"], row["grad_weight"]) == (forward, backward, backward)
    assert not gathers_fp8(plugin, ShardOptions())
    assert row["fsdp2"] == plugin.base
    plain = {"recipe": "nvfp4", "disable_rht": True, "disable_stochastic_rounding": True}
    assert FP8TE(plain).hardware_recipe == "te-nvfp4-plain"
    assert FP8TE({**plain, "disable_rht": False}).hardware_recipe == "te-nvfp4"
    own = FP8TE(type("Own", (Float8CurrentScaling,), {})())
    assert (own.hardware_recipe, own.precision) == (None, "fp8-te-Own")
    assert "NVIDIA GPUs only" in own.refusal(torch.device("cpu"))
    title = {"te-mxfp8": "MXFP8", "te-nvfp4": "NVFP4"}.get(plugin.hardware_recipe, "FP8")
    assert plugin.how(torch.device("cpu")) == f"{title} kernels of Transformer Engine on cpu"


@pytest.fixture
def unchecked():
    """The check runs once per process; here it runs again."""
    check_names.cache_clear()
    yield
    check_names.cache_clear()


@pytest.mark.parametrize(
    ("owner", "name", "lost"),
    [
        (FP8GlobalStateManager, "reduce_and_update_fp8_tensors", "FP8GlobalStateManager.reduce_and_update_fp8_tensors"),
        (FP8GlobalStateManager, "quantization_state", "quantization_state.autocast_depth"),
        (distributed, "_get_module_fsdp_state", "distributed._get_module_fsdp_state"),
    ],
)
def test_a_name_that_is_gone(monkeypatch, unchecked, owner, name, lost):
    assert moved() == []
    monkeypatch.delattr(owner, name)
    assert any(lost in words for words in moved())
    with pytest.raises(ImportError, match=rf"Transformer Engine 2\.\d+.* has no .*{name}"):
        FP8TE()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    verdict = availability("fp8-hybrid-te", torch.device("cuda", 0))
    assert not verdict.runs
    assert "Install a version that has" in verdict.reason


def test_fits_simulates_with_the_cuda_build_of_torch_and_without_a_driver():
    """Here torch is CUDA's build, and no null GPU."""
    command = ["-m", "lightning_lowprec.tools.cli", "plan", "lightning_lowprec.tools.demo.ByteGPT", "--fits", "H200"]
    command += ["--seq", "32", "--batch", "2", "--precisions", "bf16-mixed,bf16-8bit"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "not simulated" not in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    assert sum("  yes  " in line for line in (ran.stdout + ran.stderr).splitlines()) == 2
