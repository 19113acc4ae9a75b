"""The plugin in Fabric and Trainer with the real Transformer Engine, up to the first kernel."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_lowprec
from lightning_lowprec import FP8TE
from lightning_lowprec.layers.te import norms, scales, support
from lightning_lowprec.layers.te.linear import TELinear, te_linears
from lightning_lowprec.layers.te.recompute import TECheckpoint
from lightning_lowprec.precisions import TABLE, create
from tests.te.hopper import pretend
from tests.te.test_te_layers import some_scales

QUIET = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
NAMES = [name for name, entry in TABLE.items() if entry.plugin is FP8TE]
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        make = lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(torch.randn(8, 16, 32), batch_size=2)


def fabric_for(plugin):
    return L.Fabric(accelerator="cpu", devices=1, plugins=plugin)


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    for plugin in (
        L.Fabric(precision=name, accelerator="cpu").strategy.precision,
        L.Trainer(precision=name, **QUIET).precision_plugin,
    ):
        assert type(plugin) is FP8TE
        assert plugin.precision == name
        assert (plugin.scaler is not None) == name.endswith("-fp16")
    assert FP8TE(**TABLE[name].options).precision == name


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_is_refused_before_anything_is_touched(name):
    model = Net()
    with pytest.raises(RuntimeError, match=rf"`precision='{name}'` cannot run: .*NVIDIA GPUs only, and this is cpu"):
        fabric_for(create(name)).setup(model)
    assert not te_linears(model)
    with pytest.raises(RuntimeError, match="fp8-hybrid-torchao"):
        L.Trainer(precision=name, **QUIET).fit(Lit())


def test_without_a_driver_transformer_engines_own_reason_is_given(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert "no NVIDIA driver" in support.device_refusal("delayed", torch.device("cuda"))


def test_what_converts(pretend_gpu, caplog):
    model = Net()
    parameters, names = list(model.parameters()), list(model.state_dict())
    fabric = fabric_for(FP8TE(keep=["blocks.0.1", "blocks.2.0"]))
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped, optimizer = fabric.setup(model, optimizer)
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, TELinear)] == [
        "blocks.0.3", "blocks.1.1", "blocks.1.3", "blocks.2.1", "blocks.2.3",
    ]  # fmt: skip
    assert [type(block[0]) for block in model.blocks] == [norms.TELayerNorm, norms.TELayerNorm, nn.LayerNorm]
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    plugin = fabric.strategy.precision
    assert plugin.choice.summary() == (
        "converted 5 of 7 linear layers, kept 2: kept by 'blocks.0.1' ('blocks.0.1'); output head (by name)"
        " ('lm_head'); 2 of 3 norms (kept: 'blocks.2.0' kept by 'blocks.2.0')"
    )
    with pytest.raises(RuntimeError, match="an input on cpu, and computes on CUDA only"):
        wrapped(torch.randn(2, 16, 32))
    fabric.strategy.precision._check_optimizers([optimizer.optimizer])


def test_transformers_llama(pretend_gpu):
    model = LlamaForCausalLM(LLAMA)
    fabric_for(FP8TE("current")).setup(model)
    assert len(te_linears(model)) == 14
    assert type(model.lm_head) is nn.Linear
    converted = [m for m in model.modules() if isinstance(m, norms.TERMSNorm)]
    assert len(converted) == 5
    assert all(m.eps == LLAMA.rms_norm_eps and not m.zero_centered_gamma for m in converted)


def test_evaluation_in_high_precision_is_that_of_the_model(pretend_gpu, onnx_forward):
    """``fp8_eval=False``: the same numbers, to float32 rounding, through real layers."""
    model = Net().eval()
    x = torch.randn(5, 7, 32)
    expected = model(x)
    plugin = FP8TE(fp8_eval=False)
    fabric_for(plugin).setup(model)
    onnx_forward(model.eval())
    with plugin._in_both(torch.autocast("cpu", enabled=False)):
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "delayed", "first_last_layers_bf16": True}, "not valid with delayed scaling"),
        ({"recipe": "nvfp4", "base": "fp16"}, "Hadamard"),
        ({"base": "fp32"}, "expected one of: bf16, fp16"),
        ({"recipe": "current", "margin": 1}, "goes with delayed, mxfp8"),
        ({"recipe": {"recipe": "delayed", "amax_len": 3}}, "no field"),
        ({"grad_reduce_dtype": torch.float32}, "master_weights"),
        ({"recipe": "current", "loss_scale": 8.0}, "loss_scale"),
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
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, TELinear)] == ["blocks.1.1", "blocks.1.3"]


def test_only(pretend_gpu):
    model = Net()
    fabric_for(FP8TE(only=["blocks.1", "lm_head"])).setup(model)
    assert [fqn for fqn, m in model.named_modules() if isinstance(m, TELinear)] == [
        "blocks.1.1",
        "blocks.1.3",
        "lm_head",
    ]
    assert [type(block[0]) for block in model.blocks] == [nn.LayerNorm, norms.TELayerNorm, nn.LayerNorm]


def test_master_weights(pretend_gpu):
    model = Net()
    fabric = fabric_for(FP8TE(master_weights=True))
    _, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert isinstance(model.blocks[0][1], TELinear)
    assert {p.dtype for p in fabric.strategy.precision.main_params(optimizer.optimizer)} == {torch.float32}


def test_a_forgotten_parameter_raises(pretend_gpu):
    model = Net()
    fabric = fabric_for(FP8TE())
    fabric.setup(model)
    optimizer = torch.optim.AdamW(model.blocks[0].parameters())
    with pytest.raises(RuntimeError, match=r"blocks\.1\.1\.weight"):
        fabric.strategy.precision._check_optimizers([optimizer])


def test_the_trainer_up_to_the_first_kernel(pretend_gpu, tmp_path):
    model = Lit()
    trainer = L.Trainer(precision="fp8-hybrid-te", default_root_dir=tmp_path, **QUIET)
    with pytest.raises(RuntimeError, match="an input on cpu, and computes on CUDA only"):
        trainer.fit(model)
    assert len(te_linears(model)) == 6
    trainer.strategy.optimizers = [torch.optim.AdamW(model.parameters())]
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    checkpoint = torch.load(tmp_path / "some.ckpt", weights_only=True)
    assert checkpoint["FP8TE"] == {"backend": "transformer_engine"}
    Lit().load_state_dict(checkpoint["state_dict"], strict=True)


def give_scales(model, recipe, length=4):
    for number, layer in enumerate(te_linears(model)):
        entry = {key: value + number for key, value in some_scales(length).items()}
        scales.restore([("", layer)], {"": entry}, recipe)


def test_scales_travel_in_the_plugins_state(pretend_gpu, tmp_path):
    def set_up():
        model, plugin = Net(), FP8TE(amax_history_len=4)
        fabric = fabric_for(plugin)
        return model, plugin, fabric, fabric.setup(model)

    model, plugin, fabric, wrapped = set_up()
    give_scales(model, plugin.recipe)
    fabric.save(tmp_path / "some.ckpt", {"model": wrapped, "precision": plugin})
    torch.load(tmp_path / "some.ckpt", weights_only=True)
    other, resumed, fabric, wrapped = set_up()
    fabric.load(tmp_path / "some.ckpt", {"model": wrapped, "precision": resumed})
    assert resumed.state_dict().keys() == plugin.state_dict().keys()
    for name, entry in plugin.state_dict()["scales"].items():
        for key, value in entry.items():
            assert torch.equal(resumed.state_dict()["scales"][name][key], value), (name, key)
    assert len(te_linears(other)) == len(plugin.state_dict()["scales"]) == 6


def test_a_resumed_run_uses_weights_again_as_the_first_one_did(pretend_gpu):
    """The amax of a weight that is used again within a step is seen once: from the first step on, or not at all."""
    for reused in (True, False):
        model, plugin = Net(), FP8TE(amax_history_len=4)
        fabric_for(plugin).setup(model)
        give_scales(model, plugin.recipe)
        for layer in te_linears(model):
            for _ in range(1 + reused):
                layer.weight_cache.is_first_microbatch(layer.weight)
        state = plugin.state_dict()
        assert state["weights_are_reused"] is reused
        other, resumed = Net(), FP8TE(amax_history_len=4)
        fabric_for(resumed).setup(other)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["weights_are_reused"] is reused
        first = [layer.weight_cache.is_first_microbatch(layer.weight) for layer in te_linears(other)]
        assert first == [True if reused else None] * 6


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


def test_a_second_setup_keeps_the_scales(pretend_gpu):
    model, plugin = Net(), FP8TE(amax_history_len=4)
    fabric = fabric_for(plugin)
    fabric.setup(model)
    give_scales(model, plugin.recipe)
    before = scales.saved(scales.scaled_layers(model))
    plugin.convert_module(model)
    after = scales.saved(scales.scaled_layers(model))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[n][k], v) for n, entry in before.items() for k, v in entry.items())


@pytest.fixture
def unfused_update(monkeypatch):
    """Transformer Engine's own renewal of scales in torch, which a CPU runs; its buffers belong to one test."""
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


def registered(model, plugin):
    """Layers with scales, as after a forward."""
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


def test_a_model_with_its_own_layers_of_transformer_engine(pretend_gpu):
    import transformer_engine.pytorch as te

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = te.LayerNormMLP(32, 64, device="cpu")

    model, plugin = Own(), FP8TE()
    fabric_for(plugin).setup(model)  # nothing of ours converts, and it runs in FP8 nevertheless
    assert [name for name, _ in plugin._scaled_layers()] == ["0.mlp"]


def test_a_model_goes_from_one_backend_to_the_other(pretend_gpu):
    from lightning_lowprec.layers.torchao import FP8Linear

    model = Net()
    for plugin, kind in ((FP8TE(), TELinear), (lightning_lowprec.FP8TorchAO(), FP8Linear), (FP8TE(), TELinear)):
        fabric_for(plugin).setup(model)
        converted = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]
        assert [type(m) for m in converted] == [kind] * 6
        assert isinstance(model.blocks[0][0], norms.TELayerNorm) == (kind is TELinear)


def test_deepcopy_and_the_plugin_itself(pretend_gpu):
    plugin = FP8TE({"recipe": "delayed", "amax_history_len": 4}, keep=["lm_head"])
    other = copy.deepcopy(plugin)
    assert repr(other.recipe) == repr(plugin.recipe)
    assert other.recipe.amax_history_len == 4
    assert isinstance(FP8TE(DelayedScaling(margin=1)).recipe, DelayedScaling)


# ---- names without a backend


@pytest.mark.parametrize("name", ["fp8-hybrid", "fp8-e4m3-fp16"])
def test_where_transformer_engine_runs_it_is_preferred(monkeypatch, name):
    assert type(create(name)) is lightning_lowprec.FP8TorchAO  # no GPU here
    pretend(monkeypatch)
    monkeypatch.setattr(support, "every_gpu_has_fp8", lambda: True)
    plugin = create(name)
    assert type(plugin) is FP8TE
    assert plugin.precision == name
    assert type(create(name, sharded=True)) is lightning_lowprec.FP8TorchAO
    assert type(L.Fabric(precision=name, accelerator="cpu", strategy="fsdp2").strategy.precision) is (
        lightning_lowprec.FP8TorchAO
    )
    monkeypatch.setattr(support, "every_gpu_has_fp8", lambda: False)
    assert type(create(name)) is lightning_lowprec.FP8TorchAO


def test_one_that_is_installed_but_broken_raises(monkeypatch):
    import sys

    pretend(monkeypatch)
    monkeypatch.setattr(support, "every_gpu_has_fp8", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)
    with pytest.raises(ImportError, match="preferred"):
        create("fp8-hybrid")


def test_a_resumed_run_means_the_same_backend(monkeypatch):
    plugin = create("fp8-hybrid-fp16")
    message = "use 'fp8-hybrid-te-fp16'; to change over, 'fp8-hybrid-torchao-fp16'"
    with pytest.raises(RuntimeError, match=message):
        plugin.load_state_dict({"backend": "transformer_engine"})
    create("fp8-hybrid-torchao").load_state_dict({"backend": "transformer_engine"})  # a name that says its backend
    pretend(monkeypatch)
    monkeypatch.setattr(support, "every_gpu_has_fp8", lambda: True)
    with pytest.raises(RuntimeError, match="use 'fp8-e4m3-torchao'; to change over, 'fp8-e4m3-te'"):
        create("fp8-e4m3").load_state_dict({"backend": "torchao"})


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # since 5.2x
def test_gradient_checkpointing_of_transformers(pretend_gpu):
    """Delayed scaling needs Transformer Engine's checkpoint; other recipes and backends get back what was there."""
    model = LlamaForCausalLM(LLAMA)
    model.gradient_checkpointing_enable()
    layers = model.model.layers
    was = [layer._gradient_checkpointing_func for layer in layers]
    for plugin, by_te in ((FP8TE(), True), (FP8TE("current"), False), (FP8TE(), True), (FP8TE(fuse="auto"), True)):
        fabric_for(plugin).setup(model)
        assert [isinstance(layer._gradient_checkpointing_func, TECheckpoint) for layer in layers] == [by_te] * 2
    model.train()
    with pytest.raises(RuntimeError, match="no NVIDIA driver"):  # its checkpoint asks CUDA for the generator's state
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    copy.deepcopy(model)
    fabric_for(FP8TE("current")).setup(model)
    fabric_for(lightning_lowprec.FP8TorchAO()).setup(model)
    assert [layer._gradient_checkpointing_func for layer in layers] == was


# ---- fusion


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


def test_a_fused_weight_that_no_optimizer_holds_raises(pretend_gpu):
    model = LlamaForCausalLM(LLAMA)
    fabric = fabric_for(FP8TE("current", fuse="auto"))
    fabric.setup(model)
    held = [p for name, p in model.named_parameters() if "layers.1.mlp.up_proj" not in name]
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj\.weight"):
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
    scales.restore([("", one)], {"": some_scales(4)}, plugin.recipe)
    before = plugin.state_dict()["scales"]
    plugin.convert_module(model)
    after = plugin.state_dict()["scales"]
    assert before.keys() == after.keys() == {"0.model.layers.0.self_attn.o_proj"}
    assert all(torch.equal(after[n][k], v) for n, entry in before.items() for k, v in entry.items())
    FP8TE("current").convert_module(model)  # and without fusion again
    assert len(te_linears(model)) == 14


def test_fuse_is_checked():
    with pytest.raises(ValueError, match="`fuse='all'` is not valid; expected 'auto' or False"):
        FP8TE(fuse="all")
