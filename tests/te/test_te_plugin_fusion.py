"""``FP8TE(fuse="auto")``: what is fused, checked and kept over a second set-up."""

import pytest
import torch
from transformers import LlamaForCausalLM

from lightning_lowprec import FP8TE
from lightning_lowprec.te import norms
from lightning_lowprec.te.delayed_scaling import restore_scales
from lightning_lowprec.te.linear import TELinear, te_linears
from tests.te.subjects import LLAMA, fabric_for
from tests.te.test_te_layers import some_scales


def mixture():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_fused_llama(pretend_gpu, caplog):
    model = LlamaForCausalLM(LLAMA)
    names, parameters = list(model.state_dict()), list(model.parameters())
    fabric = fabric_for(FP8TE("current", fuse="auto"))
    optimizer = torch.optim.AdamW(model.parameters())
    fabric.setup(model, optimizer)
    plugin = fabric.strategy.precision
    assert [row.kind for row in plugin.choice.fusion.fused] == ["norm+linear", "norm+MLP"] * 2
    assert "fused 4 of 4 places (2 norm+linear, 2 norm+MLP)" in plugin.choice.summary()
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, TELinear)] == [
        f"model.layers.{i}.self_attn.o_proj" for i in range(2)
    ]
    assert isinstance(model.model.norm, norms.TERMSNorm)
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    plugin._check_optimizers([optimizer])
    LlamaForCausalLM(LLAMA).load_state_dict(model.state_dict(), strict=True)


def test_a_fused_weight_that_no_optimizer_holds_warns(pretend_gpu):
    model = LlamaForCausalLM(LLAMA)
    fabric = fabric_for(FP8TE("current", fuse="auto"))
    fabric.setup(model)
    held = [p for name, p in model.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.up_proj\.weight"):
        fabric.strategy.precision._check_optimizers([torch.optim.AdamW(held)])


@pytest.mark.parametrize(
    ("options", "experts", "attention"),
    [
        ({}, 2, 2),
        ({"norms": False}, 2, 0),
        ({"keep": ["model.layers.0.mlp.experts"]}, 1, 2),
        ({"keep": ["model.layers.0.self_attn.q_proj", "model.layers.1.input_layernorm"]}, 2, 0),
    ],
)
def test_fused_mixtral(pretend_gpu, options, experts, attention):
    model = mixture()
    plugin = FP8TE("current", fuse="auto", **options)
    fabric_for(plugin).setup(model)
    kinds = [row.kind for row in plugin.choice.fusion.fused]
    assert (kinds.count("grouped experts"), kinds.count("norm+linear")) == (experts, attention)


def test_a_second_setup_of_a_fused_model_keeps_its_scales(pretend_gpu):
    model, plugin = LlamaForCausalLM(LLAMA), FP8TE(amax_history_len=4, fuse="auto")
    fabric_for(plugin).setup(model)
    layers = dict(plugin._scaled_layers())
    assert len(layers) == 6  # 2 norm+linear, 2 norm+MLP, 2 o_proj
    one = layers["0.model.layers.0.self_attn.o_proj"]
    restore_scales([("", one)], {"": some_scales(4)}, plugin.recipe)
    before = plugin.state_dict()["scales"]
    plugin.convert_module(model)
    after = plugin.state_dict()["scales"]
    assert before.keys() == after.keys() == {"0.model.layers.0.self_attn.o_proj"}
    assert all(torch.equal(after[n][k], v) for n, entry in before.items() for k, v in entry.items())
    FP8TE("current", fuse="auto").convert_module(model)  # which has no use for them
    FP8TE("current").convert_module(model)  # and without fusion again
    assert len(te_linears(model)) == 14


@pytest.mark.parametrize("choice", ["all", True, "layer"])
def test_fuse_is_checked(choice):
    """The message names the way to Transformer Engine's own blocks."""
    with pytest.raises(ValueError, match=f"`fuse={choice!r}` is not valid; expected 'auto' or False") as raised:
        FP8TE(fuse=choice)
    assert "te.TransformerLayer is written into the model by hand" in str(raised.value)
    assert "docs/which-backend.md" in str(raised.value)


def test_a_misspelt_fuse_gets_the_nearest():
    with pytest.raises(ValueError, match=r"Did you mean 'auto'\?"):
        FP8TE(fuse="atuo")
