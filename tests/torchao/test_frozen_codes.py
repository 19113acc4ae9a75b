"""``FP8TorchAO(frozen="codes")``: the base under an adapter takes a byte per parameter, and computes the same."""

import copy
import io
import math
from collections import OrderedDict

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import lightning_lowprec as lp
from lightning_lowprec import FP8TorchAO, Int8TorchAO
from tests.toys import QUIET, Task

WIDTH, INNER, RANK = 144, 272, 4  # parts of tiles of 128
X = torch.randn(6, 5, WIDTH, generator=torch.Generator().manual_seed(1))


class Adapted(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.base = nn.Linear(k, n).to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, k) * 0.1)
        self.up = nn.Parameter(torch.randn(n, RANK) * 0.1)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Net(L.LightningModule):
    def __init__(self, seed=0, width=WIDTH, inner=INNER):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.trained, self.last = Adapted(width, inner), nn.Linear(inner, inner), Adapted(inner, width)
        self.losses = []

    def forward(self, x):
        return self.last(F.gelu(self.trained(self.first(x))))

    def training_step(self, batch, _):
        loss = (self(batch[0] if isinstance(batch, list) else batch).float() - 1).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def frozen_layers(model):
    return [part.base for part in model.modules() if isinstance(part, Adapted)]


def with_conv1d(seed):
    net = Net(seed)
    net.last.base = Conv1D(WIDTH, INNER).to(torch.bfloat16).requires_grad_(False)
    nn.utils.prune.identity(net.trained.requires_grad_(False), "weight")  # so it holds values
    return net


def set_up(frozen="codes", seed=0, make=Net, **options):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(frozen=frozen, **options))
    net = make(seed)
    module, optimizer = fabric.setup(net, net.configure_optimizers())
    return fabric, net, module, optimizer


def run(frozen, seed=0, steps=3, **options):
    fabric, net, module, optimizer = set_up(frozen, seed, **options)
    seen = []
    for _ in range(steps):
        x = X.clone().requires_grad_()
        loss = (module(x).float() - 1).square().mean()
        fabric.backward(loss)
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        seen.append(module(X))
    return seen


OPTIONS = [
    {"weight_codes": "per_gemm"}, {"fp8_format": "e4m3"}, {"round_scales_to_power_of_2": True}, {"base": "fp16"},
    {"emulate": "hopper"}, {"recipe": {"last.*": "block", "*": "tensorwise"}}, {"master_weights": "remainder"},
    {"make": with_conv1d},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=[*map(" ".join, OPTIONS)])
def test_losses_gradients_and_outputs_are_those_of_converted_layers(options):
    assert all(map(torch.equal, run("codes", **options), run("convert", **options)))


@pytest.mark.parametrize("recipe", ["tensorwise", "block"])
def test_a_byte_per_parameter_and_torchs_own_classes(recipe):
    _, net, _, _ = set_up(recipe=recipe)
    for layer in frozen_layers(net):
        tiles = 1 if recipe == "tensorwise" else math.prod(-(-size // 128) for size in layer.weight.shape)
        assert (layer.weight.dtype, layer.weight.element_size()) == (torch.uint8, 1)
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight_scale.numel() == tiles
    assert net.trained.weight.dtype is torch.float32


def rounded(weight):
    """The values of codes of ``w * 448 / max|w|``, divided by this scale."""
    scale = (448 / weight.abs().max().double()).float()
    return (weight.float() * scale).to(torch.float8_e4m3fn).float() / scale


def test_values_are_codes_by_scale_and_evaluation_in_high_precision_reads_them():
    _, net, _, _ = set_up()
    assert torch.equal(net.state_dict()["first.base.weight"], rounded(Net().first.base.weight).to(torch.bfloat16))
    _, net, module, _ = set_up(fp8_eval=False, make=with_conv1d)
    net.eval()
    expected = lp.plain(net, copy=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(X), expected(X))


def bits(model):
    return [tensor.clone() for layer in frozen_layers(model) for tensor in (layer.weight.data, layer.weight_scale)]


@pytest.mark.parametrize(("recipe", "assign"), [("tensorwise", False), ("block", False), ("tensorwise", True)])
def test_a_checkpoint_has_plain_keys_and_gives_the_same_codes_back(recipe, assign):
    plain_keys = {key: value.dtype for key, value in Net().state_dict().items()}
    _, net, _, _ = set_up(recipe=recipe)
    state = net.state_dict()
    assert {key: value.dtype for key, value in state.items()} == plain_keys
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    _, other, _, _ = set_up(recipe=recipe, seed=7)
    assert not torch.equal(bits(other)[0], bits(net)[0])
    other.load_state_dict(torch.load(memory, weights_only=True), assign=assign)
    assert all(map(torch.equal, bits(other), bits(net)))
    assert all(map(torch.equal, bits(copy.deepcopy(net)), bits(net)))
    assert all(map(torch.equal, bits(net.to(torch.bfloat16)), bits(other))), "a cast leaves the codes"
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.base\.weight"):
        other.load_state_dict({**state, "first.base.weight": 3 * state["first.base.weight"][:-1]}, assign=assign)
    assert torch.equal(lp.plain(other).first.base.weight, state["first.base.weight"]), "nothing of it was loaded"


@pytest.mark.parametrize(("recipe", "format"), [("tensorwise", "compressed-tensors"), ("block", "hf-fp8-block")])
def test_an_export_has_the_codes_of_the_run(recipe, format):
    net = Net(width=128, inner=256)
    L.Fabric(accelerator="cpu", plugins=FP8TorchAO(recipe, frozen="codes")).setup_module(net)
    expected = [layer.weight.data.clone() for layer in frozen_layers(net)]
    exported = dict(lp.fp8_state(net, format=format))
    found = [exported[f"{name}.base.weight"].view(torch.uint8) for name in ("first", "last")]
    assert all(map(torch.equal, found, expected))


def trainer(plugin, **options):
    return L.Trainer(accelerator="cpu", max_steps=2, plugins=plugin, **QUIET, **options)


def test_after_fit_the_decoded_values_stand_in_the_same_parameters(caplog):
    model = peft_model()
    params, layer = list(model.parameters()), model.base_model.model[0].base_layer
    before = layer.weight.clone()
    task = Task(model, lambda model, batch: model(batch).float().square().mean())
    trainer(FP8TorchAO(frozen="codes")).fit(task, torch.utils.data.DataLoader(X, batch_size=2))
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))
    assert {type(part).__module__.split(".")[0] for part in model.modules()} == {"peft", "torch"}
    weight = layer.weight
    assert (type(weight), weight.dtype) == (nn.Parameter, torch.bfloat16)
    assert not torch.equal(weight, before)
    torch.testing.assert_close(weight, before, rtol=0.0625, atol=float(before.abs().max()) * 2**-9 / 448 * 1.01)
    assert "2 frozen weights are stored as codes (frozen='codes'), 78336 bytes" in caplog.text
    assert "decoded values in bfloat16, not the values from before" in caplog.text
    assert not list(layer.named_buffers())


@pytest.mark.parametrize("unfreeze", [
    lambda net: net.requires_grad_(True),
    lambda net: setattr(net.first.base.weight, "requires_grad", True),
    lambda net: net.unfreeze(),
], ids=["module", "attribute", "lightning"])  # fmt: skip
def test_unfreezing_and_a_gradient_of_a_gradient_name_the_way_out(unfreeze):
    _, net, module, _ = set_up()
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"stored as codes\. Use `frozen='convert'`"):
        torch.autograd.grad(module(x).float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"cannot train\. .*frozen='convert'"):
        unfreeze(net)
    assert lp.plain(net).requires_grad_(True).first.base.weight.requires_grad


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        pass

    def finetune_function(self, module, epoch, optimizer):
        pass


@pytest.mark.parametrize("callback", [Unfreezes(), L.pytorch.callbacks.StochasticWeightAveraging(1e-2)])
def test_callbacks_that_need_values_are_refused(callback):
    with pytest.raises(Exception, match=f"{type(callback).__name__}.*frozen='convert'"):
        trainer(FP8TorchAO(frozen="codes"), callbacks=[callback]).fit(Net(), torch.utils.data.DataLoader(X))


def tied_pair():
    pair = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).requires_grad_(False)
    pair[1].weight = pair[0].weight
    return pair


def with_a_table():
    net = Net()
    net.table = nn.Embedding(INNER, WIDTH)
    net.table.weight = net.first.base.weight
    return net


IN_BF16 = r"'first\.base': a product of its recipe runs in bf16"
OTHERS = "is not possible.*fp8-hybrid"
REFUSED = {
    "rowwise": (FP8TorchAO, {"recipe": "rowwise"}, Net, OTHERS),
    "mxfp8": (FP8TorchAO, {"recipe": "mxfp8"}, Net, OTHERS),
    "int8": (Int8TorchAO, {}, Net, OTHERS),
    "msamp": (lp.MSAMP, {"level": "O2"}, Net, OTHERS),
    "mapping": (FP8TorchAO, {"recipe": {"first.*": "rowwise", "*": "tensorwise"}}, Net, OTHERS),
    "bf16 forward": (FP8TorchAO, {"recipe": {"first.*": {"forward": "bf16"}}}, Net, IN_BF16),
    "tied bf16": (FP8TorchAO, {"recipe": {"1": {"grad_input": "bf16"}, "*": "tensorwise"}}, tied_pair, "'1': a pro"),
    "tied scales": (FP8TorchAO, {"recipe": {"1": "block", "*": "tensorwise"}}, tied_pair, "'1': it shares .* with '0'"),
    "nothing frozen": (FP8TorchAO, {}, lambda: nn.Linear(32, 32), r"no converted layer .*weight\. Freeze the base"),
    "Embedding": (FP8TorchAO, {"only": ["*.base"]}, with_a_table, "'first.base': .*another module reads the weight"),
    "DoRA": (FP8TorchAO, {}, lambda: peft_model(use_dora=True), "is not possible for 'base_model.model.0': .*DoRA"),
    "IA3": (FP8TorchAO, {}, lambda: peft_model("IA3Config"), "for 'base_model.model.0': it is a Linear, which may"),
}


@pytest.mark.parametrize(("cls", "options", "model", "message"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_codes_or_needs_the_values_is_refused(cls, options, model, message):
    with pytest.raises(ValueError, match=f"frozen='codes'` .*{message}"):
        L.Fabric(accelerator="cpu", plugins=cls(**options, frozen="codes")).setup_module(model())


def peft_model(cls="LoraConfig", **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)).to(torch.bfloat16)
    options |= {"r": RANK, "init_lora_weights": False} if cls == "LoraConfig" else {"feedforward_modules": []}
    config = getattr(peft, cls)(target_modules=["0", "2"], **options)
    return peft.get_peft_model(net, config)


def test_an_adapter_of_peft_trains_and_merges(caplog):
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO(frozen="codes"))
    model = peft_model()
    keys = list(model.state_dict())
    lines = str(lp.plan(model, "fp8-hybrid", frozen="codes")).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("FP8, stored as codes")] == [
        "base_model.model.0.base_layer",
        "base_model.model.2.base_layer",
    ]
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    fabric.backward(module(X).float().square().mean())
    optimizer.step()
    assert list(model.state_dict()) == keys
    layer = model.base_model.model[0]
    merged = layer.base_layer.values()
    merged += layer.get_delta_weight("default").detach()
    model.merge_adapter()
    assert layer.base_layer.weight.dtype is torch.uint8
    assert torch.equal(layer.base_layer.weight, layer.base_layer.encoded(merged)[0])
    assert caplog.text.count("decoded, changed and encoded again") == 1
    model.unmerge_adapter()
    torch.nn.init.constant_(layer.lora_B["default"].weight, math.nan)
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert layer.base_layer.weight.dtype is torch.uint8
    lora = type(model.peft_config["default"])
    model.add_adapter("plain", lora(r=RANK, target_modules=["0", "2"]))
    with pytest.raises(ValueError, match=r"frozen='codes'` is not possible for 'second': .*DoRA"):
        model.add_adapter("second", lora(r=RANK, target_modules=["0"], use_dora=True))
    model.delete_adapter("plain")
    whole = lp.plain(model).merge_and_unload()
    assert whole[0].weight.dtype is torch.bfloat16
    assert type(layer).__module__.startswith("peft")


def test_tied_layers_have_one_scale_through_a_merge_and_a_load(caplog):
    peft, names = pytest.importorskip("peft"), ("first", "second", "third")
    config = peft.LoraConfig(r=RANK, target_modules=list(names), init_lora_weights=False)
    torch.manual_seed(0)
    tied = nn.Sequential(OrderedDict((name, nn.Linear(32, 32, bias=False)) for name in names))
    tied.second.weight = tied.third.weight = tied.first.weight
    model = peft.get_peft_model(tied, config)
    L.Fabric(accelerator="cpu", plugins=FP8TorchAO(frozen="codes")).setup_module(model)
    assert "1 frozen weights are stored as codes (frozen='codes'), 1024 bytes" in caplog.text
    adapters = list(model.base_model.model)
    layers = first, second, third = [adapter.base_layer for adapter in adapters]
    second.weight_scale, third.weight_scale = first.weight_scale.clone(), first.weight_scale.clone()  # as after a move
    expected = first.values()
    for adapter in adapters:
        expected = rounded(expected + adapter.get_delta_weight("default").detach())
    model.merge_adapter()
    assert all(torch.equal(layer.values(), expected) for layer in layers)
    second.weight_scale, third.weight_scale = first.weight_scale.clone(), first.weight_scale.clone()
    key = "base_model.model.{}.base_layer.weight".format
    model.load_state_dict({key("first"): 3 * expected}, strict=False)
    assert all(torch.equal(layer.values(), rounded(3 * expected)) for layer in layers)
    apart = copy.deepcopy(model)
    apart.load_state_dict({key("first"): 7 * expected}, strict=False, assign=True)  # torch gives this one a weight
    for name in ("second", "third"):
        apart.load_state_dict({key(name): 5 * expected}, strict=False)
    for adapter, factor in zip(apart.base_model.model, (7, 5, 5), strict=True):
        assert torch.equal(adapter.base_layer.values(), rounded(factor * expected))
    lp.plain(model)
    assert second.weight is first.weight
    assert second.weight.dtype is torch.float32
