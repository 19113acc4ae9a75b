"""No matrix product of a training step is float32, unless the model or torch wants float32.

A few families that differ in how they multiply; ``python -m tests.peers.dtypes`` runs all of them.
"""

import pytest
import torch

import lightning_lowprec
from tests.families.products import step
from tests.families.tiny import build, classes

pytestmark = pytest.mark.slow

MIXTURES = {  # the number of products of stacked experts in the forward pass
    "mixtral": 6,
    "gpt_oss": 6,  # biases, transposed
    "nemotron_h": 2,  # no gate
    "deepseek_v3": 4,  # a dense first layer; attention in float32 by torch's kernel for its shapes
    "llama4": 0,  # products of batches, by its own code
    "qwen3_next": 6,  # linear attention
    "longcat_flash": 0,  # a list of experts
}
DENSE = ("gpt2", "t5", "bert", "vit", "mamba")


def tiny(family):
    return build(classes(f"transformers.models.{family}.modeling_{family}")[0])


@pytest.mark.parametrize("family", [*MIXTURES, *DENSE])
def test_of_a_family(family):
    products = step(tiny(family), "half-auto")
    assert products.faults() == []
    assert products.backward_surplus() <= 0
    half = [row for row in products.rows if not row.float32 and not row.backward]
    assert len(half) > 6
    assert sum("grouped" in row.op for row in half) == MIXTURES.get(family, 0)


@pytest.mark.parametrize("name", ["fp8-rowwise", "msamp-o2"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "bert", "t5"])
def test_of_a_family_in_fp8(family, name):
    products = step(tiny(family), name)
    assert products.faults() == []
    assert products.own, "no layer was converted"


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "gpt2", "bert", "nemotron_h"])
def test_the_plan_says_the_dtype_that_a_kept_weight_runs_in(family):
    model = tiny(family)
    rows = [row for row in lightning_lowprec.plan(model, keep=["*"]).rows if row.runs_in is not None]
    assert {row.runs_in for row in rows} == {"bf16"}
    assert any(row.kind != "Linear" for row in rows) or family == "bert"
    products = step(model, "half-auto").rows
    for row in rows:
        fqn = row.fqn if row.kind != "stacked experts" else row.fqn.rpartition(".")[0]
        dtypes = {
            dtype for product in products if product.module == fqn and not product.backward for dtype in product.dtypes
        }
        assert dtypes == {torch.bfloat16}, row


def test_finds_experts_that_nobody_mends(monkeypatch):
    faults = step(tiny("mixtral"), "bf16-mixed").faults()
    assert len(faults) == MIXTURES["mixtral"]
    assert all("grouped_mm (float32, float32" in fault and ".mlp.experts" in fault for fault in faults)
