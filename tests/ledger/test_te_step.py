"""Steps through Transformer Engine on CUDA tensors: norms in one graph, masters, the host's work."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch import nn
from torch._dynamo.utils import counters
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from benchmarks.ledger.recorder import recording
from benchmarks.ledger.step import measure
from benchmarks.rivals import models, setups
from benchmarks.rivals.models import TOY
from benchmarks.rivals.running import Job, Running
from benchmarks.rivals.te_layers import use_te_layers
from lightning_lowprec import FP8TE

pytestmark = pytest.mark.usefixtures("fresh")
DEVICE = torch.device("cuda")
JOB = Job(shape=models.TOY, device=DEVICE, compile=False)
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(64), te.LayerNorm),
    "RMSNorm": (lambda: nn.RMSNorm(64, eps=1e-5), te.RMSNorm),
}


def converted(norm):
    """Return the norm of a model that was set up, without the context of its precision."""
    model = nn.Sequential(norm, nn.Linear(64, 64)).to(DEVICE)
    L.Fabric(accelerator="cuda", devices=1, plugins=FP8TE("current")).setup_module(model)
    return model[:1]


def launched(body):
    with recording() as log:
        body()
    return [record.name for record in log.of("kernel")]


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_launches_the_kernels_of_transformer_engine_or_compiles_into_one_graph(kind):
    """Compiled, torch computes the same formula; a graph break would raise (`fullgraph`)."""
    make, cls = NORMS[kind]
    model = converted(make())
    assert isinstance(model[0], cls)
    x = torch.zeros(3, 16, 64, device=DEVICE, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step(norm):
        with torch.autocast("cuda", torch.bfloat16):
            output = norm(x)
        assert (output.dtype, output.shape) == (torch.bfloat16, x.shape)
        output.sum().backward()
        found = {name: p.grad.shape for name, p in model.named_parameters()}
        assert found == {name: p.shape for name, p in model.named_parameters()}
        assert (x.grad.shape, x.grad.dtype) == (x.shape, torch.float32)

    step(compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert not any("transformer_engine" in name for name in launched(lambda: step(compiled)))
    ours = [name for name in launched(lambda: step(model)) if "transformer_engine" in name]
    by_hand = cls(64, device=DEVICE, eps=1e-5)

    def step_by_hand():
        with torch.autocast("cuda", torch.bfloat16):
            output = by_hand(x)
        output.sum().backward()

    assert ours == [name for name in launched(step_by_hand) if "transformer_engine" in name]
    assert len(ours) >= 2


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.rehearsed)])
def test_nothing_of_ours_ends_the_graph_of_a_block(recipe, monkeypatch):
    """``te.Linear`` ends graphs on torch 2.11; in its place stands an operation of torch, as on newer versions."""
    monkeypatch.setattr(te.Linear, "forward", lambda layer, x, first: F.linear(x, layer.weight.to(x.dtype)))
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TE(recipe))
    model = models.build(models.TOY, DEVICE)
    wrapped = fabric.setup_module(model)
    for block in model.layers:
        assert isinstance(block.attention_norm, te.RMSNorm)
        block.compile(backend="aot_eager", fullgraph=True)
    for rows in (4, 3):
        tokens = torch.zeros(rows, 11, dtype=torch.long, device=DEVICE)  # rows that are padded too
        fabric.backward(wrapped(tokens, tokens))
    assert counters["graph_break"] == {}


@pytest.mark.parametrize(
    ("name", "options", "shards"),
    [
        ("fp8-hybrid-te-remainder", {}, torch.bfloat16),
        ("fp8-block-te", {"master_weights": True}, torch.float32),  # FSDP2's float32 shards are the masters
    ],
)
def test_masters_train_sharded(name, options, shards):
    running = setups.ours(JOB, name=name, options=options, strategy="fsdp2")
    data = models.batches(JOB.shape, 2, DEVICE, count=1)
    for _ in range(2):
        running.step(data)
    with recording() as log:
        running.step(data)
    assert not log.waits()
    assert {parameter.dtype for parameter in running.bare.parameters()} == {shards}


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.first(self.second(x))


def test_delayed_scales_are_reduced_in_the_order_of_the_model():
    """Ranks whose layers ran first in another order would give a layer the amax of another one."""
    model = Backwards().to(DEVICE)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TE())
    fabric.setup_module(model)(torch.zeros(16, 64, device=DEVICE)).sum().backward()
    buffers = FP8GlobalStateManager.quantization_state.global_scale_buffer.values()
    of_pass = [[id(scale) for scale in scales] for scales in buffers]
    for mode in ("scaling_fwd", "scaling_bwd"):
        first, second = (id(layer.fp8_meta[mode].scale) for layer in (model.first, model.second))
        (order,) = [scales for scales in of_pass if first in scales]
        assert order.index(first) < order.index(second)


def test_blocks_of_transformer_engines_own_run_in_fp8_in_a_model_under_our_plugin():
    """``te.TransformerLayer``: the way out that docs/speed.md names."""

    def setup(job):
        bare = models.build(TOY, job.device)
        use_te_layers(bare)
        fabric = L.Fabric(accelerator="cuda", devices=1, plugins=FP8TE())
        module = fabric.setup_module(bare)
        optimizer = fabric.setup_optimizers(job.make_optimizer(module))
        return Running(model=module, bare=bare, optimizer=optimizer, backward=fabric.backward)

    flops = measure("", setup, TOY).whole().product_flops
    weights = 2 * TOY.hidden * (TOY.hidden + TOY.kv_heads * TOY.head_dim) + 3 * TOY.hidden * TOY.ffn  # of a block
    tokens = 2 * TOY.sequence
    assert sum(flops[which] for which in ("float8 fast", "float8 exact")) == 6 * weights * TOY.layers * tokens
