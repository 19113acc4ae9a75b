"""No matrix product of a training step is float32, unless the model or torch wants float32.

A few families that differ in how they multiply; ``python -m tests.peers.dtypes`` runs all of them.
"""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_lowprec import HalfMixed
from lightning_lowprec.conversion import experts
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.conversion.plan import make_plan
from tests.families.products import Products
from tests.families.tiny import batch, build, classes, loss_of

pytestmark = pytest.mark.slow

MIXTURES = {  # the number of products of stacked experts in the forward pass
    "mixtral": 6,
    "gpt_oss": 6,  # biases, transposed
    "nemotron_h": 2,  # no gate
    "deepseek_v3": 4,  # a dense first layer; attention in float32 by torch's kernel for its shapes
    "ernie4_5_moe": 4,  # a router in float32
    "llama4": 0,  # products of batches, by its own code
    "qwen3_next": 6,  # linear attention
    "longcat_flash": 0,  # a list of experts
}
DENSE = ("gpt2", "t5", "bert", "vit", "falcon", "bloom", "mamba")


def step(model, name, inputs=None):
    """The products of a training step."""
    fabric = L.Fabric(precision=name, accelerator="cpu")
    cls = torch.optim.AdamW if name.startswith("msamp") else torch.optim.SGD  # MS-AMP steps Adam alone
    wrapped, optimizer = fabric.setup(model, cls(model.parameters(), lr=1e-3))
    inputs = batch(model) if inputs is None else inputs
    with Products(model) as products:
        fabric.backward(loss_of(wrapped(**inputs)))
    optimizer.step()
    return products


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
    rows = [row for row in make_plan(model, LayerOptions(keep=["*"])).rows if row.runs_in is not None]
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
    """Under Lightning's own name, every product of the experts runs in float32."""
    faults = step(tiny("mixtral"), "bf16-mixed").faults()
    assert len(faults) == MIXTURES["mixtral"]
    assert all("grouped_mm (float32, float32" in fault and ".mlp.experts" in fault for fault in faults)


def test_experts_after_revert():
    """A model that leaves our precision multiplies as transformers does."""
    model = tiny("mixtral")
    step(model, "half-auto")
    experts.stop_following_autocast(model)
    assert len(step(model, "bf16-mixed").faults()) == MIXTURES["mixtral"]


class Parts(nn.Module):
    """Torch's own layers and functions in which dtypes meet."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.recurrent = nn.ModuleList([nn.LSTM(64, 64), nn.GRU(64, 64)])
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(4, 64, 64) / 8)
        self.head = nn.Parameter(torch.randn(96, 64))

    def forward(self, x, target):
        x = self.encoder(self.attention(x, x, x)[0])
        for layer in self.recurrent:
            x = layer(x)[0]
        x = self.conv(x.mT).mT
        heads = x.reshape(2, 4, 16, 16)
        x = F.scaled_dot_product_attention(heads.bfloat16(), heads.bfloat16(), heads.float()).reshape(2, 16, 64)
        x = torch.einsum("bsi,eij->bsj", x, self.experts)
        return F.linear_cross_entropy(x.flatten(0, 1), self.head, target)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="needs torch 2.12")
def test_operations_of_torch():
    inputs = {"x": torch.randn(2, 16, 64), "target": torch.randint(0, 96, (32,))}
    model = Parts()
    fabric = L.Fabric(plugins=HalfMixed("bf16"), accelerator="cpu")
    wrapped = fabric.setup(model)
    with Products(model) as products:
        fabric.backward(wrapped(**inputs))
    assert products.faults() == []
    found = {row.called.rpartition(".")[2] for row in products.rows if not row.backward}
    assert {"linear_cross_entropy", "scaled_dot_product_attention", "lstm", "conv1d", "einsum"} <= found, found
