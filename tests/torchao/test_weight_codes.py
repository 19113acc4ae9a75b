"""Codes of weights that are kept from step to step: the same results as without, whatever happens to the weights."""

import copy
import io

import lightning as L
import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.torchao import weight_codes
from lightning_lowprec.torchao.linear import fp8_linears

X = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1))  # 21 tokens: rows are padded


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64, bias=False)) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_of(model, x=X):
    return (model(x) - 1).float().square().mean()


@pytest.fixture
def encoded(monkeypatch):
    """The number of weights that each refresh encoded."""
    counts, encode = [], weight_codes.ModelCodes._encode

    def counting(self, weights, *args):
        counts.append(len(weights))
        encode(self, weights, *args)

    monkeypatch.setattr(weight_codes.ModelCodes, "_encode", counting)
    return counts


def set_up(codes="per_step", **options):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(weight_codes=codes, **options))
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return fabric, net, model, optimizer


def run(codes, change=lambda step, net: None, micro_batches=2, steps=3, **options):
    fabric, net, model, optimizer = set_up(codes, **options)
    losses = []
    for step in range(steps):
        for _ in range(micro_batches):
            loss = loss_of(model)
            fabric.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        change(step, net)
    return losses, [p.detach().clone() for p in net.parameters()]


def same(left, right):
    return left[0] == right[0] and all(map(torch.equal, left[1], right[1]))


OPTIONS = [
    {},
    {"base": "fp16"},
    {"fp8_format": "e4m3"},
    {"round_scales_to_power_of_2": True},
    {"master_weights": True},
    {"master_weights": "remainder"},
    {"compile": {"backend": "aot_eager"}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_results_are_those_of_encoding_at_every_product(options, encoded):
    assert same(run("per_step", **options), run("per_gemm", **options))
    assert encoded == [4, 4, 4], "four weights once per step, of two micro-batches each"


def in_place(step, net):
    with torch.no_grad():
        net.blocks[0][0].weight.mul_(1.5)


def by_data_after_a_step(step, net):
    net.blocks[0][0].weight.data.clamp_(-0.05, 0.05)


def replaced_data(step, net):
    net.blocks[0][0].weight.data = net.blocks[0][0].weight.data * 1.5


def loaded(step, net):
    net.load_state_dict({key: value * 0.5 for key, value in net.state_dict().items()})


def replaced_parameter(step, net):
    net.blocks[1][0].weight = nn.Parameter(net.blocks[1][0].weight.detach() * 1.5)


def averaged_in_evaluation(step, net):
    """What Lightning's WeightAveraging does: swap values through `.data` while the model evaluates."""
    weight = net.blocks[0][0].weight
    before = weight.data.clone()
    net.eval()
    weight.data.copy_(before * 0.5)
    with torch.no_grad():
        net(X)
    weight.data.copy_(before)
    net.train()


@pytest.mark.parametrize(
    "change", [in_place, by_data_after_a_step, replaced_data, loaded, replaced_parameter, averaged_in_evaluation]
)
def test_changed_weights_are_encoded_again(change):
    assert same(run("per_step", change), run("per_gemm", change))


def test_only_what_changed_is_encoded(encoded):
    _, net, model, _ = set_up()
    loss_of(model)
    with torch.no_grad():
        net.blocks[1][2].weight.mul_(2)
    loss_of(model)
    loss_of(model)
    assert encoded == [4, 1]


def test_frozen_weights_are_encoded_once(encoded):
    net = Net().requires_grad_(False)
    net.blocks[0][0].weight.requires_grad_(True)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO())
    model, optimizer = fabric.setup(net, torch.optim.SGD([net.blocks[0][0].weight], lr=0.1))
    for _ in range(3):
        fabric.backward(loss_of(model))
        optimizer.step()
        optimizer.zero_grad()
    assert encoded == [4, 1, 1]
    assert net.blocks[1][0].weight.grad is None


def test_a_weight_that_changes_between_forward_and_backward_is_autograds_error():
    """As with nn.Linear: the graph has saved codes, and new codes are in their place."""
    fabric, net, model, _ = set_up()
    loss = loss_of(model)
    in_place(0, net)
    loss_of(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fabric.backward(loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_use_the_same_codes(reentrant, encoded):
    found = []
    for codes in ("per_step", "per_gemm"):
        fabric, net, _, _ = set_up(codes)
        x = X.clone().requires_grad_()
        with fabric.autocast():
            out = checkpoint(net.blocks[0], x.bfloat16(), use_reentrant=reentrant)
        fabric.backward(out.float().square().mean())
        found.append([p.grad for p in net.blocks[0].parameters()])
    assert all(map(torch.equal, *found))
    assert len(encoded) == 1


def test_gradients_that_are_differentiated_are_those_in_high_precision():
    found = []
    for codes in ("per_step", "per_gemm"):
        _, net, _, _ = set_up(codes)
        x = X.clone().requires_grad_()
        (grad,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append([p.grad for p in net.parameters() if p.grad is not None])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=2e-2, atol=2e-2 * right.abs().max().item())


def test_copies_pickles_and_state_dicts_have_no_codes():
    _, net, model, _ = set_up()
    loss_of(model)
    assert set(net.state_dict()) == set(Net().state_dict())
    layer = net.blocks[0][0]
    assert layer.weight_codes.made.rows.shape == layer.weight.shape
    for clone in (copy.deepcopy(net), through_pickle(net)):
        assert all(found.weight_codes is None for found in fp8_linears(clone))
        assert torch.equal(clone(X), net(X))


def through_pickle(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_second_set_up_keeps_codes_again_and_reverting_frees_them():
    _, net, model, _ = set_up(compile={"backend": "aot_eager"})
    loss_of(model)
    plugin = FP8TorchAO(compile={"backend": "aot_eager"})
    again = L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup_module(net)
    first = loss_of(again).item()
    in_place(0, net)
    assert loss_of(again).item() != first, "compiled blocks check their codes"
    plugin_per_gemm = FP8TorchAO(weight_codes="per_gemm", compile=False)
    L.Fabric(accelerator="cpu", devices=1, plugins=plugin_per_gemm).setup_module(net)
    assert all(layer.weight_codes is None for layer in fp8_linears(net))


def test_a_model_that_the_user_compiles_as_a_whole_does_not_use_kept_codes(encoded):
    fabric, net, _, _ = set_up()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    with fabric.autocast():
        first = compiled(X.bfloat16())
        in_place(0, net)
        assert not torch.equal(compiled(X.bfloat16()), first)
    assert not encoded


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_row_scales_are_encoded_at_every_product(recipe):
    assert FP8TorchAO(recipe).weight_codes == "per_gemm"
    with pytest.raises(ValueError, match="only one scale per weight is the same in forward and backward"):
        FP8TorchAO(recipe, weight_codes="per_step")


def test_an_unknown_choice():
    with pytest.raises(ValueError, match="weight_codes"):
        FP8TorchAO(weight_codes="per_epoch")


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_adapters_that_peft_merges_during_evaluation_are_encoded(compiled):
    """PEFT adds them by `weight.data +=`, which changes no version, and the mode stays evaluation."""
    outputs = {}
    for codes in ("per_step", "per_gemm"):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["blocks.0.0", "blocks.1.0"], init_lora_weights=False)
        tuned = peft.get_peft_model(Net(), config)
        tuned.add_adapter("second", config)
        options = {"compile": {"backend": "eager"}} if compiled else {}
        fabric = L.Fabric(accelerator="cpu", devices=1, plugins=FP8TorchAO(weight_codes=codes, **options))
        fabric.setup(tuned)
        tuned.eval()
        found = outputs[codes] = [tuned(X)]
        for change in (
            tuned.merge_adapter,
            tuned.unmerge_adapter,
            lambda: tuned.merge_adapter(["second"]),  # noqa: B023
            tuned.unmerge_adapter,
            tuned.merge_and_unload,
        ):
            kept = change() or tuned
            found.append(kept(X))
    assert not torch.equal(outputs["per_gemm"][0], outputs["per_gemm"][1])
    assert all(map(torch.equal, outputs["per_step"], outputs["per_gemm"]))


@torch.no_grad()
def test_eval_encodes_again_after_a_write_that_changes_no_version():
    outputs = []
    for codes in ("per_step", "per_gemm"):
        _, net, model, _ = set_up(codes)
        net.eval()
        model(X)
        net.blocks[0][0].weight.data.mul_(1.5)
        net.eval()
        outputs.append(model(X))
    assert torch.equal(*outputs)
