"""Fused models compute what they computed before, and their Parameters do not notice: Transformer Engine on CPU."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from lightning_lowprec.numerics.padding import pad_rows
from lightning_lowprec.te.convert import scaled_layers
from lightning_lowprec.te.delayed_scaling import restore_scales, saved_scales
from lightning_lowprec.te.fusion import engines, fuse, fused_modules, unfuse
from tests.quality import sqnr
from tests.te.decoders import MAKERS, linears, make, ragged
from tests.te.onnx_path import plain_torch

pytestmark = [pytest.mark.usefixtures("pretend_gpu"), pytest.mark.filterwarnings("default")]
PLACES = dict.fromkeys(MAKERS, "2 norm+linear, 2 norm+MLP") | {
    "neox": "4 norm+linear", "mixtral": "2 norm+linear", "mixtral-all": "2 norm+linear",
}  # fmt: skip


def fused_copy(model, **options):
    fused = copy.deepcopy(model)
    fusion = fuse(fused, may_convert=linears(fused), **options)
    return fused, fusion


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def gradients(model, batch):
    model.zero_grad()
    with plain_torch(model):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    return {fqn: parameter.grad for fqn, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", MAKERS)
def test_outputs_and_gradients_are_those_of_the_model(name):
    model = make(name)
    fused, fusion = fused_copy(model)
    assert f"({PLACES[name]})" in fusion.summary()
    for batch in (ragged(1, 1), ragged(2, 7), ragged(3, 16)):
        with plain_torch(fused), torch.no_grad():
            close(fused(**batch).logits, model(**batch).logits)
    found, wanted = gradients(fused, batch), gradients(model, batch)
    assert found.keys() == wanted.keys()
    for fqn in wanted:
        assert wanted[fqn].abs().sum() > 0
        close(found[fqn], wanted[fqn])


@pytest.mark.parametrize("name", ["llama", "neox-tanh-serial"])
def test_in_bf16_it_is_as_near_to_float32_as_the_model(name):
    with torch.no_grad():
        exact = make(name)(**ragged(3, 16)).logits
        model = make(name).bfloat16()
        fused, _ = fused_copy(model)
        unfused = sqnr(exact, model(**ragged(3, 16)).logits.float())
        with plain_torch(fused):
            assert sqnr(exact, fused(**ragged(3, 16)).logits.float()) > unfused - 2.0


def test_a_gradient_of_a_gradient_through_fused_layers_raises():
    fused, _ = fused_copy(make("llama"))
    with plain_torch(fused):
        loss = fused(**ragged(2, 7)).logits.float().pow(2).sum()
        with pytest.raises(RuntimeError, match=r"create_graph=True.*a layer of Transformer Engine.*keep="):
            torch.autograd.grad(loss, next(iter(fused.parameters())), create_graph=True)


def test_every_fused_layer_computes_with_its_engine(monkeypatch):
    fused, _ = fused_copy(make("llama"))
    called = []
    for name, engine in engines(fused).items():
        monkeypatch.setattr(engine, "forward", lambda *a, n=name, f=engine.forward, **k: called.append(n) or f(*a, **k))
    with plain_torch(fused), torch.no_grad():
        fused(**ragged(2, 5))
    layer = [f"model.layers.{i}.{norm}" for i in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")]
    assert called == layer


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_generation_with_a_cache(name):
    model = make(name)
    fused, _ = fused_copy(model)
    options = {"max_new_tokens": 6, "do_sample": False}
    with plain_torch(fused):
        assert torch.equal(fused.generate(**ragged(2, 5), **options), model.generate(**ragged(2, 5), **options))


def test_attentions_hidden_states_and_checkpointing():
    model = make("llama-eager").train()
    fused, _ = fused_copy(model)
    ask = {"output_attentions": True, "output_hidden_states": True}
    with plain_torch(fused), torch.no_grad():
        found, wanted = fused(**ragged(2, 7), **ask), model(**ragged(2, 7), **ask)
    for a, b in zip(
        (*found.attentions, *found.hidden_states), (*wanted.attentions, *wanted.hidden_states), strict=True
    ):
        close(a, b)
    wanted = gradients(model, ragged(2, 7))
    fused.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for fqn, grad in gradients(fused, ragged(2, 7)).items():
        close(grad, wanted[fqn])


@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()], ids=["delayed", "current"])
def test_torchs_recomputation_in_a_backward_pass_is_in_fp8_again(recipe):
    """torch's checkpoints restore torch's autocast only. With delayed scaling the scales would be others: an error."""
    fused = nn.Sequential(nn.RMSNorm(32, eps=1e-5), nn.Linear(32, 32, bias=False)).train()
    fuse(fused, may_convert=["1"])
    (engine,) = engines(fused).values()
    engine.fp8, engine.fp8_meta["recipe"] = True, recipe  # as after a forward in FP8
    seen = []
    engine.compute = lambda parameters, x: seen.append(FP8GlobalStateManager.get_fp8_recipe()) or x
    x = torch.randn(16, 32, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: (fused(x.detach()), grad)[1])  # what a checkpoint's unpack hook does
    if recipe.delayed():
        with pytest.raises(RuntimeError, match="renewed its scales"):
            y.sum().backward()
    else:
        y.sum().backward()
    assert seen == ([] if recipe.delayed() else [recipe])
    assert not FP8GlobalStateManager.is_fp8_enabled()


def test_compiled_layers_and_inference_mode(monkeypatch):
    model = make("llama")
    fused, _ = fused_copy(model)
    with plain_torch(fused), torch.inference_mode():
        close(fused(**ragged(2, 7)).logits, model(**ragged(2, 7)).logits)
    monkeypatch.undo()  # the compiler asks for the GPU
    for layer in fused.model.layers:
        layer.compile(backend="eager")
    wanted = gradients(model, ragged(2, 7))
    for fqn, grad in gradients(fused, ragged(2, 7)).items():
        close(grad, wanted[fqn])


def test_parameters_keys_and_optimizers_do_not_notice():
    model = make("llama")
    parameters, keys = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fuse(model, may_convert=linears(model))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    original = make("llama")
    reference = torch.optim.SGD(original.parameters(), lr=0.1)
    for one, stepper in ((model, optimizer), (original, reference)):
        gradients(one, ragged(2, 7))
        stepper.step()
    fresh = make("llama")
    fresh.load_state_dict(model.state_dict())  # strict, into the original class
    with torch.no_grad():
        close(fresh(**ragged(2, 5)).logits, original(**ragged(2, 5)).logits)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_the_ones_that_compute(assign):
    model, (fused, _) = make("llama"), fused_copy(make("llama"))
    state = {key: torch.randn_like(value) * 0.2 for key, value in model.state_dict().items()}
    for one in (model, fused):
        one.load_state_dict(copy.deepcopy(state), assign=assign)
    with plain_torch(fused), torch.no_grad():
        close(fused(**ragged(2, 5)).logits, model(**ragged(2, 5)).logits)


def test_meta_models_fuse_before_they_have_weights():
    with torch.device("meta"):
        fused = MAKERS["llama"]()
    fuse(fused, may_convert=linears(fused))
    fused.load_state_dict(make("llama").state_dict(), assign=True)
    fused.model.rotary_emb = make("llama").model.rotary_emb
    with plain_torch(fused), torch.no_grad():
        close(fused.eval()(**ragged(2, 5)).logits, make("llama")(**ragged(2, 5)).logits)


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_fused_and_independent(remake):
    fused, _ = fused_copy(make("llama"))
    with plain_torch(fused), torch.no_grad():
        fused(**ragged(2, 5))
    other = remake(fused)
    assert not any("_is_fsdp2" in vars(engine) for engine in engines(other).values())  # a copy may be sharded anew
    assert [type(m) for m in fused_modules(other)] == [type(m) for m in fused_modules(fused)]
    assert not {id(e) for e in engines(other).values()} & {id(e) for e in engines(fused).values()}
    with torch.no_grad():
        for parameter in fused.parameters():
            parameter.zero_()
    with plain_torch(other), torch.no_grad():
        close(other(**ragged(2, 5)).logits, make("llama")(**ragged(2, 5)).logits)


def test_delayed_scales_are_saved_restored_and_copied():
    fused, _ = fused_copy(make("llama"))
    name = "model.layers.1.post_attention_layernorm"  # an MLP: two GEMMs
    state = {
        "forward.scale": torch.rand(6), "forward.amax_history": torch.rand(4, 6),
        "backward.scale": torch.rand(4), "backward.amax_history": torch.rand(4, 4),
    }  # fmt: skip
    recipe = DelayedScaling(amax_history_len=4)
    assert restore_scales(list(scaled_layers(fused)), {name: state}, recipe) == []
    for one in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        found = saved_scales(scaled_layers(one))
        assert found.keys() == {name}
        assert all(torch.equal(found[name][key], state[key]) for key in state)


def test_engines_keep_nothing_after_a_step():
    fused, _ = fused_copy(make("llama"))
    gradients(fused, ragged(2, 7))
    assert all(value is None for engine in engines(fused).values() for value in engine._parameters.values())
    assert not set(map(id, engines(fused).values())) & set(map(id, fused.modules()))


def test_unfuse_gives_back_what_was():
    model = make("neox-tanh-serial")
    before = {fqn: (type(module), list(vars(module))) for fqn, module in model.named_modules()}
    fuse(model, may_convert=linears(model))
    with plain_torch(model), torch.no_grad():
        model(**ragged(2, 5))
    assert fused_modules(model)
    with pytest.raises(RuntimeError, match=r"fused already; call `unfuse\(model\)` first"):
        fuse(model, may_convert=linears(model))
    unfuse(model)
    assert {fqn: (type(module), list(vars(module))) for fqn, module in model.named_modules()} == before
    assert engines(model) == {}
    with torch.no_grad():
        close(model(**ragged(2, 5)).logits, make("neox-tanh-serial")(**ragged(2, 5)).logits)


def test_a_norm_and_a_linear_of_a_sequential():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 48), nn.ReLU(), nn.RMSNorm(48, 1e-3), nn.Linear(48, 16, False)
    )
    with torch.no_grad():
        model[0].bias.normal_()
        model[3].weight.normal_()
    fused, fusion = fused_copy(model)
    assert [row.fqn for row in fusion.fused] == ["0", "3"]
    assert fusion.handled == {"0", "1", "3", "4"}
    for shape in [(5, 32), (2, 3, 32), (32,), (0, 32), (3, 0, 32)]:
        x = torch.randn(shape)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = []
        for one, leaf in zip((model, fused), leaves, strict=True):
            with plain_torch(one):
                outputs.append(one(leaf))
            outputs[-1].pow(2).sum().backward()
        close(outputs[1], outputs[0])
        close(leaves[1].grad, leaves[0].grad)
    for a, b in zip(model.parameters(), fused.parameters(), strict=True):
        close(b.grad, a.grad)


def test_rows_are_filled_up_with_a_row_that_is_there_already():
    x = torch.randn(3, 7, 4).requires_grad_()
    rows = pad_rows(x, 16, repeat_last=True)
    assert rows.shape == (32, 4)
    assert torch.equal(rows[:21], x.reshape(21, 4))
    assert all(torch.equal(row, x[2, 6]) for row in rows[21:])
    rows.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))  # the copies add nothing
    assert pad_rows(x, 7, repeat_last=True).data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m, x: m[0](x).mean(), r"no values of its own, and `.mean` was asked .*unfuse\(model\)"),
        (lambda m, x: nn.functional.linear(m[0](x), m[1].weight), r"no values of its own, and `linear` was asked"),
        (lambda m, x: m[1](x), r"called without the norm that it is fused with"),
        (lambda m, x: m[3](m[0](x)), r"given the output of another norm"),
    ],
)
def test_other_uses_of_a_fused_norm_raise(use, message):
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    fuse(model, may_convert=linears(model))
    with pytest.raises((RuntimeError, AttributeError, TypeError), match=message):
        use(model, torch.randn(4, 32))


def test_frozen_weights_get_no_gradient_and_others_theirs():
    model = make("llama")
    model.requires_grad_(False)
    model.model.layers[1].mlp.gate_proj.requires_grad_(True)
    fused, _ = fused_copy(model)
    found, wanted = gradients(fused, ragged(2, 7)), gradients(model, ragged(2, 7))
    assert [fqn for fqn, grad in found.items() if grad is not None] == ["model.layers.1.mlp.gate_proj.weight"]
    close(found["model.layers.1.mlp.gate_proj.weight"], wanted["model.layers.1.mlp.gate_proj.weight"])


def test_without_cuda_transformer_engine_says_so_and_nothing_is_fused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = make("llama")
    with pytest.raises(RuntimeError, match="TransformerEngine needs CUDA"):
        fuse(model, may_convert=linears(model))
    assert fused_modules(model) == []
