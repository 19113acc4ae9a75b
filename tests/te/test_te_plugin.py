"""The plugin in Fabric and Trainer with the real Transformer Engine, up to the first kernel."""

import copy

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.callbacks import Callback
from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformers import LlamaForCausalLM

import lightning_lowprec
from lightning_lowprec import FP8TE
from tests.conversion.test_plan import Distance
from tests.te.reference import LLAMA, QUIET, Lit, Net, fabric_for, give_scales, some_scales, te_linears


def test_what_converts(pretend_gpu, caplog):
    model = Net()
    model.blocks[2][0], model.distance = nn.LayerNorm(32, bias=False), Distance(nn.LayerNorm(32))
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
        "converted 5 of 8 linear layers, kept 3, 2 of them in bf16: kept by 'blocks.0.1' ('blocks.0.1'); output head"
        " (by name) ('lm_head'); inside of a torchmetrics.Metric ('distance.encoder.0'); 1 Conv1d do not run in FP8;"
        " 2 of 4 norms (kept: 'blocks.2.0' has no bias, which Transformer Engine's kernels need and 1 more)"
    )
    with pytest.raises(RuntimeError, match="an input on cpu, and computes on CUDA only"):
        wrapped(torch.randn(2, 16, 32))
    few = Net()
    fabric_for(FP8TE(only=["blocks.0.1"])).setup(few)
    assert [type(block[0]) for block in few.blocks] == [nn.LayerNorm] * 3
    middle = Net()
    fabric_for(FP8TE("current", first_last_layers_bf16=True)).setup(middle)
    assert [fqn for fqn, m in middle.named_modules() if isinstance(m, te.Linear)] == ["blocks.1.1", "blocks.1.3"]


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({}, nn.Sequential(nn.Linear(20, 20)), "would convert none of the 1 linear layers"),
        ({"recipe": "mxfp8"}, nn.Sequential(nn.Linear(48, 48)), "(?s)no multiples of 32.* are multiples of 32"),
        ({"keep": ["gone"]}, Net(), "matches no Linear"),
        ({"fp8_dpa": True}, Net(), "Transformer Engine's own attention"),
        ({"recipe": "current", "first_last_layers_bf16": True}, nn.Sequential(nn.Linear(32, 32)), "stack of blocks"),
        ({"recipe": "delayed", "first_last_layers_bf16": True}, None, "not valid with delayed scaling"),
        ({"recipe": "nvfp4", "base": "fp16"}, None, "Hadamard"),
    ],
)
def test_options_and_models_that_do_not_fit(pretend_gpu, options, model, message):
    with pytest.raises(ValueError, match=message):
        fabric_for(FP8TE(**options)).setup(model)


def test_delayed_scales_wait_while_the_model_is_plain(pretend_gpu, caplog, monkeypatch):
    plugin, model, given = FP8TE(amax_history_len=4), Lit(), {}

    class Sets(Callback):
        def on_train_start(self, trainer, module):
            give_scales(module, plugin.recipe)
            given.update(plugin.state_dict()["scales"])

    trainer = L.Trainer(plugins=plugin, callbacks=[Sets()], **QUIET)
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
    plugin.load_state_dict({"scales": {"0.gone": some_scales(4)}})
    assert plugin.state_dict()["scales"].keys() == given.keys()
    assert "No layer for 1 of the checkpoint's delayed scales ('0.gone', ...)" in caplog.text
    monkeypatch.setattr("lightning_lowprec.precision.set_up.default_device", lambda: torch.device("cuda"))
    late, late_model = FP8TE(amax_history_len=4), Lit()
    late.convert_module(late_model)  # which may still move: its first forward sets it up
    late.load_state_dict({"scales": given})
    with late.forward_context():
        expected = [tensors["forward.scale"].tolist() for tensors in given.values()]
        assert [layer.fp8_meta["scaling_fwd"].scale.tolist() for layer in te_linears(late_model)] == expected


def test_a_model_with_its_own_layers_of_transformer_engine(pretend_gpu):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp, self.attention = te.LayerNormMLP(32, 64, device="cpu"), te.DotProductAttention(2, 16)

    model, plugin = Own(), FP8TE(fp8_dpa=True)
    for each in (model, model.attention, model):  # nothing of ours converts, and it runs in FP8 nevertheless
        fabric_for(plugin).setup(each)
    assert [name for name, _ in plugin._scaled_layers()] == ["0.mlp", "0.attention", "1"]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # since 5.2x
def test_gradient_checkpointing_of_transformers(pretend_gpu):
    """Delayed scaling needs Transformer Engine's checkpoint; other recipes and backends get back what was there."""
    model = LlamaForCausalLM(LLAMA)
    model.gradient_checkpointing_enable()
    layers = model.model.layers
    holders = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    fabric_for(FP8TE("current")).setup(model)
    assert len(te_linears(model)) == 14
    assert type(model.lm_head) is nn.Linear
    converted = [m for m in model.modules() if isinstance(m, te.RMSNorm)]
    assert [(m.eps, m.zero_centered_gamma) for m in converted] == [(LLAMA.rms_norm_eps, False)] * 5
    was = [layer._gradient_checkpointing_func for layer in layers]
    for plugin, by_te in ((FP8TE(), True), (FP8TE(), True), (FP8TE("current"), False), (FP8TE(), True)):
        fabric_for(plugin).setup(model)
        assert [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)] == holders
        assert ([layer._gradient_checkpointing_func for layer in layers] == was) == (not by_te)
    model.train()
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):  # its checkpoint asks CUDA for the generator's state
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    copy.deepcopy(model)
    fabric_for(FP8TE("current")).setup(model)
    fabric_for(lightning_lowprec.FP8TorchAO()).setup(model)
    assert [layer._gradient_checkpointing_func for layer in layers] == was


# ---- delayed scales: in the state, in a resumed run, after an overflow


def test_no_layer_renews_the_backward_scales(pretend_gpu):
    """The first to run would, but only in its own backward pass, which need not come."""
    for recipe, first in (("delayed", False), ("current", True)):
        plugin = FP8TE(recipe)
        fabric_for(plugin).setup(Net())
        with plugin.forward_context():
            assert FP8GlobalStateManager.quantization_state.is_first_fp8_module is first


def test_scales_have_no_use_with_another_recipe(pretend_gpu, caplog):
    plugin = FP8TE("current")
    fabric_for(plugin).setup(Net())
    plugin.load_state_dict({"backend": "transformer_engine", "scales": {"0.blocks.0.1": some_scales(4)}})
    assert plugin.state_dict() == {"backend": "transformer_engine"}
    assert "Dropped the delayed scales of the checkpoint: `precision='fp8-current-te'` needs none." in caplog.text


@pytest.fixture
def unfused_update(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def registered(model, plugin):
    give_scales(model, plugin.recipe)
    for layer in te_linears(model):
        layer.fp8_meta |= {"recipe": plugin.recipe, "fp8_group": None}
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(layer.fp8_meta)
    FP8GlobalStateManager.quantization_state.autocast_arguments[
        FP8GlobalStateManager.get_unique_autocast_key(plugin.recipe, None)
    ] = (plugin.recipe, None)
    return te_linears(model)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_an_overflow_leaves_no_amax_behind(pretend_gpu, unfused_update, base, bad):
    """The scale after a step is that of the history without it: 57344 (e5m2) or 448 (e4m3) over the largest amax."""
    model, plugin = Net(), FP8TE(base=base, amax_history_len=4)
    _, optimizer = fabric_for(plugin).setup(model, torch.optim.SGD(model.parameters(), lr=0.0))
    first, second = registered(model, plugin)[:2]
    for layer in (first, second):
        for key in ("scaling_fwd", "scaling_bwd"):
            layer.fp8_meta[key].amax_history[:] = 0
            layer.fp8_meta[key].amax_history[1] = 2.0  # an earlier step
            layer.fp8_meta[key].amax_history[0] = 4.0  # this one
    first.fp8_meta["scaling_bwd"].amax_history[0, 0] = bad
    first.fp8_meta["scaling_fwd"].amax_history[0, 1] = bad
    with plugin.forward_context():
        pass
    optimizer.step()
    for layer in (first, second):
        assert layer.fp8_meta["scaling_fwd"].amax_history.isfinite().all()
        assert layer.fp8_meta["scaling_bwd"].amax_history.isfinite().all()
    assert first.fp8_meta["scaling_fwd"].scale.tolist() == [448 / 4, 448 / 2, 448 / 4]
    assert first.fp8_meta["scaling_bwd"].scale.tolist() == [57344 / 2, 57344 / 4]
    assert second.fp8_meta["scaling_fwd"].scale.tolist() == [448 / 4] * 3
    assert second.fp8_meta["scaling_bwd"].scale.tolist() == [57344 / 4] * 2


def scales_of(model):
    return [
        tensor.clone()
        for layer in te_linears(model)
        for key in ("scaling_fwd", "scaling_bwd")
        for tensor in (layer.fp8_meta[key].scale, layer.fp8_meta[key].amax_history)
    ]


def note_amax(model, value):
    for layer in te_linears(model):
        layer.fp8_meta["scaling_fwd"].amax_history[0] = value
        layer.fp8_meta["scaling_bwd"].amax_history[0] = value


def steps(plugin, model, optimizer, values, micro_batches=1):
    for value in values:
        for number in range(micro_batches):
            last = number == micro_batches - 1
            with plugin.forward_context():
                note_amax(model, value if last else 3.0)
            note_amax(model, value if last else 3.0)
        optimizer.zero_grad()
        if plugin.scaler is not None:
            plugin.scaler.scale_loss(torch.ones(()))  # by a scale of 1
        for p in model.parameters():
            p.grad = torch.full_like(p, value)
        optimizer.step()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "options", [{"skip_nonfinite": True}, {"base": "fp16", "loss_scale": 1.0}], ids=["bf16", "fp16"]
)
def test_a_skipped_step_restores_scales_and_histories(pretend_gpu, unfused_update, options, micro_batches):
    found = []
    for bad in ([float("nan")], [float("inf"), float("nan")], []):
        FP8GlobalStateManager.reset()
        model, plugin = Net(), FP8TE(amax_history_len=4, **options)
        _, optimizer = fabric_for(plugin).setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        registered(model, plugin)
        steps(plugin, model, optimizer, [2.0, 8.0, *bad, 4.0], micro_batches)
        assert plugin.skipped_steps == len(bad)
        found.append([*scales_of(model), *model.parameters()])
    for other in found[:-1]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[-1], strict=True))
    assert all(tensor.isfinite().all() for tensor in found[0])
    assert found[0][0].tolist() == [448 / 8] * 3, "the scales follow the steps that were made"


def test_layers_that_got_their_scales_in_a_skipped_step_begin_again(pretend_gpu, unfused_update):
    model, plugin = Net(), FP8TE(skip_nonfinite=True, amax_history_len=4)
    _, optimizer = fabric_for(plugin).setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with plugin.forward_context():
        registered(model, plugin)
        note_amax(model, 2.0)
    note_amax(model, float("nan"))
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert plugin.skipped_steps == 1
    for layer in te_linears(model):
        for key in ("scaling_fwd", "scaling_bwd"):
            assert (layer.fp8_meta[key].scale == 1.0).all()
            assert (layer.fp8_meta[key].amax_history == 0.0).all()
    steps(plugin, model, optimizer, [4.0])
    assert te_linears(model)[0].fp8_meta["scaling_fwd"].scale.tolist() == [448 / 4] * 3


def test_a_skipped_step_has_weights_quantised_anew(pretend_gpu, unfused_update):
    """Else the amax of a weight that is kept would be missing in the next step."""
    for skips in (True, False):
        model, plugin = Net(), FP8TE(skip_nonfinite=True, amax_history_len=4, fp8_params=True)
        _, optimizer = fabric_for(plugin).setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        layer = registered(model, plugin)[0]
        with plugin.forward_context():
            assert layer._is_first_microbatch() is True
            assert layer._is_first_microbatch() is False
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan") if skips else 1.0)
        optimizer.step()
        assert layer._is_first_microbatch() is True
