"""Evaluation in the precision of a server: the logits of the exported model, and a training that does not notice."""

import copy
import warnings
import weakref

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torchmetrics import MeanMetric
from transformers import AutoModelForCausalLM

import lightning_lowprec
from lightning_lowprec import LowPrecisionEval
from lightning_lowprec.serving.formats import find_format
from lightning_lowprec.serving.served_layers import ServedLayers, ServedWeight
from tests.serving.models import FP8_FORMATS, converted, llama, mixtral, served, spread_rows
from tests.toys import ON_CPU

UP = "model.layers.0.mlp.up_proj"
TOKENS = torch.arange(24).reshape(1, -1) % 96


@pytest.fixture(autouse=True)
def quiet_libraries():
    """transformers and its integrations warn about CPUs, Lightning about loaders without workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def db(signal, other):
    return 10 * torch.log10(signal.square().sum() / (signal - other).square().sum()).item()


def e4m3_of(values, dim, limit=448.0):
    """Round to e4m3 with the largest value of ``dim`` at 448: the textbook formula, in float64 but for the codes."""
    scale = values.double().abs().amax(dim, keepdim=True) / limit
    return (values.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


# ---- the logits are those of the server


@pytest.mark.parametrize("precision", ["fp8-rowwise", "fp8-hybrid", "msamp-o3"])
@pytest.mark.parametrize(
    ("format", "weights_only"),
    [("compressed-tensors", True), ("compressed-tensors", False), ("torchao", True)],
    ids=["compressed-tensors-w8", "compressed-tensors-w8a8", "torchao-w8"],
)
def test_logits_are_bit_for_bit_those_of_the_exported_and_loaded_model(tmp_path, precision, format, weights_only):
    model = converted(llama(), precision)
    lightning_lowprec.export(
        model, tmp_path / "out", format=format, dtype="fp32", weights_only=weights_only, progress=False
    )
    with torch.no_grad():
        there = served(tmp_path / "out")(TOKENS).logits
    with LowPrecisionEval(format, weights_only=weights_only).on(model):
        here = model(TOKENS).logits
    assert torch.equal(here, there)
    with torch.no_grad():
        own = model.eval()(TOKENS).logits
    assert not torch.equal(own, there)


def test_a_layer_with_rounded_activations_is_torchaos_own_product_in_bf16(tmp_path):
    model = converted(llama(), "fp8-rowwise")
    lightning_lowprec.export(model, tmp_path / "out", format="torchao", progress=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").get_submodule(UP)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    with LowPrecisionEval("torchao").on(model), torch.autocast("cpu", torch.bfloat16):
        here, there = model.get_submodule(UP)(x), loaded(x)
    assert here.dtype == there.dtype == torch.bfloat16
    assert torch.equal(here, there)


@pytest.mark.parametrize("format", ["hf-fp8-block", "compressed-tensors"])
def test_experts_have_the_codes_of_the_published_ones(tmp_path, format):
    """transformers on CPU rounds no activations of experts; so weights alone are compared."""
    model = converted(mixtral(), "fp8-rowwise")
    weights_only = format == "compressed-tensors"
    lightning_lowprec.export(
        model, tmp_path / "out", format=format, dtype="fp32", weights_only=weights_only, progress=False
    )
    loaded = served(tmp_path / "out").model.layers[0].mlp.experts
    found = ServedLayers(model, find_format(format), weights_only=weights_only, options=None)
    stack = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = found._experts[stack][name]
        assert weight.is_coded
        assert torch.equal(weight.values(TOKENS.float()), getattr(loaded, name))


@pytest.mark.parametrize("precision", ["fp8-rowwise", None], ids=["fp8", "plain"])
def test_experts_multiply_the_decoded_stack(precision):
    model = spread_rows(mixtral()) if precision is None else converted(mixtral(), precision)
    plain = mixtral().eval() if precision else copy.deepcopy(model).eval()
    for name, parameter in plain.named_parameters():
        parts = name.split(".")
        if {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"} & set(parts):
            scale = 448 / parameter.data.abs().amax(-1, keepdim=True)
            scale = torch.exp2(torch.floor(torch.log2(scale))) if precision else scale
            parameter.data = (parameter.data * scale).to(torch.float8_e4m3fn).float() / scale
    evaluation = LowPrecisionEval(weights_only=True)
    own = type(model.model.layers[0].mlp.experts)
    with evaluation.on(model), torch.no_grad():
        here, there = model(TOKENS).logits, plain(TOKENS).logits
    assert db(there, here) > 90
    assert type(model.model.layers[0].mlp.experts) is own


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_activations_are_rounded_with_the_formats_groups(format):
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 128))
    x = torch.randn(3, 5, 256) * torch.exp2(torch.arange(256) / 64)
    if format == "hf-fp8-block":
        grouped = e4m3_of(x.unflatten(-1, (2, 128)), -1).flatten(-2)
        weight = torch.cat([e4m3_of(part.flatten(), 0).view(128, 128) for part in layer[0].weight.split(128, 1)], 1)
    else:
        grouped, weight = e4m3_of(x, -1), e4m3_of(layer[0].weight, -1)
    expected = F.linear(grouped, weight, layer[0].bias.double())
    with LowPrecisionEval(format).on(layer):
        found = layer(x)
    assert db(expected, found.double()) > 100
    assert db(expected, F.linear(x, layer[0].weight, layer[0].bias).double()) < 45


def values_of_codes(weight, precision):
    """The values that the run multiplies by in FP8; the format's own where the run has no FP8."""
    weight = torch.empty_like(weight, dtype=torch.float32).copy_(weight)
    amax = weight.abs().amax() if precision.startswith("msamp") else weight.abs().amax(1, keepdim=True)
    scale = torch.tensor(448.0).div(amax)  # `448 / amax` is two roundings: of the reciprocal, and of the product
    if "fp8" in precision or "msamp" in precision:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (weight * scale).to(torch.float8_e4m3fn).float() * (1 / scale)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-8bit", "bf16-true", "fp8-rowwise", "msamp-o2"])
def test_every_training_precision_is_served_and_restored(precision):
    fabric = L.Fabric(accelerator="cpu", precision=precision)
    raw = llama()
    model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-3))
    model.train()
    raw.model.embed_tokens.eval()
    before = [module.training for module in model.modules()]
    fabric.backward(model(TOKENS, labels=TOKENS).loss)
    optimizer.step()
    evaluation = LowPrecisionEval(weights_only=True)
    with evaluation.on(model):
        assert not raw.training
        first = model(TOKENS).logits
        layer = raw.get_submodule(UP)
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(torch.eye(128, dtype=torch.bfloat16)).t()
        assert torch.equal(found, values_of_codes(layer.weight, precision).bfloat16())
    assert [module.training for module in model.modules()] == before
    assert all("forward" not in vars(module) for module in raw.modules())
    with evaluation.on(model):
        assert torch.equal(model(TOKENS).logits, first)


# ---- what is kept


def test_layers_that_the_run_or_the_format_keeps_are_not_rounded():
    model = torch.nn.Sequential(torch.nn.Linear(144, 144), torch.nn.Linear(144, 128), torch.nn.Linear(128, 128))
    lightning_lowprec.FP8TorchAO("rowwise", keep=["2"]).convert_module(model)
    x = torch.randn(16, 128)
    with LowPrecisionEval("compressed-tensors").on(model):
        assert torch.equal(model[2](x), F.linear(x, model[2].weight, model[2].bias))
    with pytest.raises(ValueError, match=r"no weight in FP8: .*multiples of 128"):
        LowPrecisionEval("hf-fp8-block").on(torch.nn.Sequential(torch.nn.Linear(144, 144))).__enter__()
    model.append(converted(torch.nn.Sequential(torch.nn.Linear(128, 128)), "fp8-rowwise"))
    y = torch.randn(4, 144)
    with LowPrecisionEval("hf-fp8-block").on(model):  # its own layer is in FP8; the format has no place for 144
        assert torch.equal(model[0](y), F.linear(y, model[0].weight, model[0].bias))
        assert not torch.equal(model[3](x), F.linear(x, model[3][0].weight, model[3][0].bias))


def test_layers_are_chosen_where_no_run_has():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    x = torch.randn(4, 32)
    with LowPrecisionEval(keep=["1"]).on(model):
        assert not torch.equal(model[0](x), F.linear(x, model[0].weight, model[0].bias))
        assert torch.equal(model[1](x), F.linear(x, model[1].weight, model[1].bias))
    with pytest.raises(ValueError, match="Leave `keep` and `only` out"):
        LowPrecisionEval(keep=["1"]).on(converted(model, "fp8-rowwise")).__enter__()


def test_a_lora_adapter_stays_in_high_precision():
    import peft

    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 128)
    with LowPrecisionEval(weights_only=True).on(model):
        base = e4m3_of(layer.base_layer.weight, 1).float()
        expected = F.linear(x, base) + 2 * layer.lora_B["default"](layer.lora_A["default"](x))
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


# ---- training does not notice


class Module(L.LightningModule):
    """Draws random numbers in validation, and logs a number and a metric."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 64))
        self.mean = MeanMetric()
        self.seen = []

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def validation_step(self, batch, _):
        noise = torch.rand(1)
        loss = self.net(batch).float().sub(batch).square().mean() + noise
        self.mean(loss)
        self.seen.append(loss.item())
        self.log("val_loss", loss)
        self.log_dict({"val_mean": self.mean})
        if getattr(self, "fails", False):
            raise KeyError("the user's own")

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(precision, callbacks, **options):
    torch.manual_seed(1)
    data = torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=4)
    module = Module()
    trainer = L.Trainer(precision=precision, max_epochs=2, callbacks=callbacks, **ON_CPU, **options)
    trainer.fit(module, data, data)
    return module, trainer


def assert_same_run(one, other):
    (a, first), (b, second) = one, other
    for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True):
        assert torch.equal(torch.empty_like(x).copy_(x), torch.empty_like(y).copy_(y))
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (first, second)]
    for x, y in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(x[key], y[key]) for key in x if isinstance(x[key], torch.Tensor))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-8bit", "fp8-hybrid", "msamp-o3"])
def test_a_run_with_the_callback_trains_bit_for_bit_as_one_without(precision):
    without = fit(precision, [])
    draws = torch.rand(1)
    evaluated = fit(precision, [LowPrecisionEval()])
    assert torch.equal(torch.rand(1), draws)
    assert_same_run(without, evaluated)
    for name in ("val_loss", "val_mean"):
        assert evaluated[1].callback_metrics[name] != without[1].callback_metrics[name]
    assert all(module.training for module in evaluated[0].net.modules())


def test_both_losses_come_from_two_evaluations():
    """The second Trainer has the callback; the model is plain after the first."""
    module, _ = fit("fp8-rowwise", [])
    data = torch.utils.data.DataLoader(torch.randn(16, 64), batch_size=4)
    found = {}
    for which, callbacks in (("own", []), ("served", [LowPrecisionEval()])):
        trainer = L.Trainer(precision="fp8-rowwise", callbacks=callbacks, **ON_CPU)
        torch.manual_seed(5)
        found[which] = [run(module, data, verbose=False)[0] for run in (trainer.validate, trainer.test)]
    for own, coded in zip(found["own"], found["served"], strict=True):
        assert own.keys() == coded.keys() == {"val_loss", "val_mean"}
        assert own["val_loss"] != coded["val_loss"]


def test_an_exception_leaves_the_model_as_it_was():
    module = Module()
    module.fails = True
    evaluation = LowPrecisionEval()
    data = torch.utils.data.DataLoader(torch.randn(4, 64))
    trainer = L.Trainer(precision="fp8-rowwise", max_epochs=1, callbacks=[evaluation], **ON_CPU)
    with pytest.raises(KeyError, match="the user's own"):
        trainer.fit(module, data, data)
    assert all("forward" not in vars(part) for part in module.modules())

    model = llama()
    with pytest.raises(RuntimeError, match="indices"), evaluation.on(model):
        model(torch.zeros(1))
    assert model.training
    assert all("forward" not in vars(part) for part in model.modules())


def test_compiled_blocks_run_eagerly_and_are_not_compiled_again():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    model[0].compile(backend=backend)
    whole = torch.compile(model, backend=backend)
    x = torch.randn(4, 32)
    before = whole(x), model[0](x)
    count = len(graphs)
    with LowPrecisionEval().on(whole):
        assert not torch.equal(whole(x), before[0])
        assert not torch.equal(model[0](x), before[1])
    assert torch.equal(whole(x), before[0])
    assert torch.equal(model[0](x), before[1])
    assert len(graphs) == count


def test_codes_take_one_byte_per_weight_and_are_freed():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 32, bias=False))
    layers = ServedLayers(model, find_format("compressed-tensors"), weights_only=False, options=None)
    assert not any("_codes" in vars(weight) for _, weight in layers._linears)  # made at the first forward
    with torch.no_grad(), layers.swapped():
        model(torch.randn(2, 64))
    assert [weight._codes[0].nbytes for _, weight in layers._linears] == [64 * 64, 64 * 32]
    evaluation, trainer = LowPrecisionEval(), L.Trainer(**ON_CPU)
    evaluation.on_test_start(trainer, torch.nn.Sequential(model))
    weight = weakref.ref(model[0].forward.args[1])
    assert isinstance(weight(), ServedWeight)
    evaluation.on_test_end(trainer, model)
    assert weight() is None


def test_wrong_options_and_gradients_are_refused():
    with pytest.raises(ValueError, match=r"`format='hf'` is not valid here"):
        LowPrecisionEval("hf")
    with pytest.raises(ValueError, match=r"`weights_only=True` is not valid with `format='hf-fp8-block'`"):
        LowPrecisionEval("hf-fp8-block", weights_only=True)
    trainer = L.Trainer(callbacks=[LowPrecisionEval(), LowPrecisionEval("torchao")], **ON_CPU)
    with pytest.raises(ValueError, match="A Trainer takes one `LowPrecisionEval`"):
        trainer.validate(Module(), torch.utils.data.DataLoader(torch.randn(4, 64)))
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32)), torch.randn(2, 32, requires_grad=True)
    refused = pytest.raises(RuntimeError, match=r"Evaluate under `torch.no_grad\(\)`")
    with LowPrecisionEval().on(model), torch.enable_grad(), refused:
        model(x)
