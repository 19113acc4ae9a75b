"""The plugin in Fabric and Trainer with the real Transformer Engine, up to the first kernel."""

import copy

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.callbacks import Callback
from torch import nn
from transformers import LlamaForCausalLM

import lightning_lowprec
from lightning_lowprec import FP8TE
from tests.te.reference import LLAMA, QUIET, Lit, Net, fabric_for, give_scales, te_linears


def test_what_converts(pretend_gpu, caplog):
    model = Net()
    model.blocks[2][0] = nn.LayerNorm(32, bias=False)
    parameters, names = list(model.parameters()), list(model.state_dict())
    fabric = fabric_for(FP8TE(keep=["blocks.0.1"]))
    wrapped = fabric.setup(model)
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, te.Linear)] == [
        "blocks.0.3", "blocks.1.1", "blocks.1.3", "blocks.2.1", "blocks.2.3",
    ]  # fmt: skip
    assert [isinstance(block[0], te.LayerNorm) for block in model.blocks] == [True, True, False]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    plugin = fabric.strategy.precision
    assert plugin.plan.summary() == (
        "converted 5 of 7 linear layers, kept 2 in bf16: kept by 'blocks.0.1' ('blocks.0.1'); output head (by name)"
        " ('lm_head'); 2 of 3 norms (kept: 'blocks.2.0' has no bias, which Transformer Engine's kernels need)"
    )
    with pytest.raises(RuntimeError, match="an input on cpu, and computes on CUDA only"):
        wrapped(torch.randn(2, 16, 32))
    few = Net()
    fabric_for(FP8TE(only=["blocks.0.1"])).setup(few)
    assert [type(block[0]) for block in few.blocks] == [nn.LayerNorm] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "delayed", "first_last_layers_bf16": True}, "not valid with delayed scaling"),
        ({"recipe": "nvfp4", "base": "fp16"}, "Hadamard"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        FP8TE(**options)


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({}, nn.Sequential(nn.Linear(20, 20)), "would convert none of the 1 linear layers"),
        ({"recipe": "mxfp8"}, nn.Sequential(nn.Linear(48, 48)), "multiples of 32"),
        ({"keep": ["gone"]}, Net(), "matches no Linear"),
        ({"fp8_dpa": True}, Net(), "Transformer Engine's own attention"),
        ({"recipe": "current", "first_last_layers_bf16": True}, nn.Sequential(nn.Linear(32, 32)), "stack of blocks"),
    ],
)
def test_models_that_do_not_fit(pretend_gpu, options, model, message):
    with pytest.raises(ValueError, match=message):
        fabric_for(FP8TE(**options)).setup(model)


def test_first_and_last_blocks(pretend_gpu):
    model = Net()
    fabric_for(FP8TE("current", first_last_layers_bf16=True)).setup(model)
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, te.Linear)] == ["blocks.1.1", "blocks.1.3"]


def test_delayed_scales_wait_while_the_model_is_plain(pretend_gpu):
    plugin, model, given = FP8TE(amax_history_len=4), Lit(), {}

    class Sets(Callback):
        def on_train_start(self, trainer, module):
            give_scales(module, plugin.recipe)
            given.update(plugin.state_dict()["scales"])

    trainer = L.Trainer(plugins=plugin, callbacks=[Sets()], enable_checkpointing=False, **QUIET)
    with pytest.raises(RuntimeError, match="computes on CUDA only"):
        trainer.fit(model)
    assert not te_linears(model)
    assert plugin.state_dict()["scales"].keys() == given.keys()
    plugin.convert_module(model)
    found = plugin.state_dict()["scales"]
    assert len(found) == len(te_linears(model)) == 6
    for name, tensors in found.items():
        assert all(
            torch.equal(tensors[f"{mode}.scale"], given[name][f"{mode}.scale"]) for mode in ("forward", "backward")
        )


def test_a_model_with_its_own_layers_of_transformer_engine(pretend_gpu):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = te.LayerNormMLP(32, 64, device="cpu")

    model, plugin = Own(), FP8TE()
    fabric_for(plugin).setup(model)  # nothing of ours converts, and it runs in FP8 nevertheless
    assert [name for name, _ in plugin._scaled_layers()] == ["0.mlp"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # since 5.2x
def test_gradient_checkpointing_of_transformers(pretend_gpu):
    """Delayed scaling needs Transformer Engine's checkpoint; other recipes and backends get back what was there."""
    model = LlamaForCausalLM(LLAMA)
    model.gradient_checkpointing_enable()
    layers = model.model.layers
    fabric_for(FP8TE("current")).setup(model)
    assert len(te_linears(model)) == 14
    assert type(model.lm_head) is nn.Linear
    converted = [m for m in model.modules() if isinstance(m, te.RMSNorm)]
    assert [(m.eps, m.zero_centered_gamma) for m in converted] == [(LLAMA.rms_norm_eps, False)] * 5
    was = [layer._gradient_checkpointing_func for layer in layers]
    for plugin, by_te in ((FP8TE(), True), (FP8TE("current"), False), (FP8TE(), True)):
        fabric_for(plugin).setup(model)
        assert ([layer._gradient_checkpointing_func for layer in layers] == was) == (not by_te)
    model.train()
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):  # its checkpoint asks CUDA for the generator's state
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    copy.deepcopy(model)
    fabric_for(FP8TE("current")).setup(model)
    fabric_for(lightning_lowprec.FP8TorchAO()).setup(model)
    assert [layer._gradient_checkpointing_func for layer in layers] == was


def test_only_modules_that_had_a_checkpoint_function_have_one(pretend_gpu):
    model, function = Net(), object()
    model.blocks[1]._gradient_checkpointing_func = function
    for plugin, by_te in ((FP8TE(), True), (FP8TE(), True), (FP8TE("current"), False)):
        fabric_for(plugin).setup(model)
        (holder,) = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
        assert holder is model.blocks[1]
        assert (holder._gradient_checkpointing_func is function) == (not by_te)
