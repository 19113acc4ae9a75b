"""Model families of transformers: what is kept, 20 steps in FP8, and back into the plain class."""

import inspect

import lightning as L
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from lightning_lowprec import FP8TorchAO
from tests.conversion.test_head import build
from tests.toys import causal_loss, stepped

pytestmark = pytest.mark.slow

transformers.logging.set_verbosity_error()
IDS = torch.arange(16).view(2, 8)
CONVERTED = {  # in one block: the linears of the architecture; of Mixtral two stacks of experts, too
    "llama": 7, "qwen2": 7, "gpt_neox": 4, "mixtral": 6, "gpt2": 4, "falcon": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERTED)
def test_trains_saves_and_loads_into_the_plain_class(name, tmp_path):
    model = build(name)
    fabric = L.Fabric(precision="fp8-hybrid", accelerator="cpu")
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    assert len(fabric.strategy.precision.plan.converted) == CONVERTED[name]
    tokens = torch.randint(0, 96, (3, 21), generator=torch.Generator().manual_seed(1))  # 63 tokens: no multiple of 16
    losses = stepped(fabric, optimizer, (causal_loss(wrapped, tokens) for _ in range(20)))
    assert losses[-1] < losses[0] - 1.0
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key
    with torch.no_grad():
        exact = plain.eval()(input_ids=tokens).logits
        ours = wrapped.eval()(input_ids=tokens).logits
    noise = (ours.double() - exact.double()).pow(2).mean() / exact.double().pow(2).mean()
    assert -10 * torch.log10(noise) > 20.0, "FP8's own noise is about 28 dB a layer"


@pytest.fixture(scope="module")
def many_blocks():
    """Two equal models of 10 blocks, more than torch compiles one by one, one of them compiled; and the graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    models = []
    for compile in (False, {"backend": backend}):
        model = build("llama", num_hidden_layers=10)
        plugin = FP8TorchAO(compile=compile)
        models.append(L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup(model))
    return *models, graphs


def test_all_blocks_run_one_graph_and_who_asks_for_a_cache_gets_it(many_blocks):
    eager, compiled, graphs = many_blocks
    for labels in ({"labels": IDS}, {}):
        with torch.no_grad():
            assert torch.equal(*(m.eval()(input_ids=IDS, **labels).logits for m in (eager, compiled)))
    assert len(graphs) == 1, "for labels; with a cache blocks run uncompiled"
    losses = []
    for model in (eager.train(), compiled.train()):
        losses.append(model(input_ids=IDS, labels=IDS).loss)
        losses[-1].backward()
    assert len(graphs) == 2
    assert torch.equal(*losses)
    gradients = ([p.grad for p in model.parameters()] for model in (eager, compiled))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    before = len(graphs)
    assert compiled.train()(input_ids=IDS, use_cache=True).past_key_values is not None
    name = "cache" if "cache" in inspect.signature(compiled.module.forward).parameters else "past_key_values"
    following = []
    with torch.no_grad():
        for model in (eager.eval(), compiled.eval()):
            past = model(input_ids=IDS[:, :-1]).past_key_values
            following.append(model(input_ids=IDS[:, -1:], **{name: past}).logits)
            assert past.get_seq_length() == 8
    assert torch.equal(*following)
    assert len(graphs) == before
