"""What conversion keeps: checked over random module trees, and each check is shown to fail on a broken swap."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.conversion.in_place import unchanged
from lightning_lowprec.conversion.layer_runs import remove_hooks
from lightning_lowprec.torchao.linear import coded_layers, revert
from tests.toys import convert


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Own(nn.Linear):
    """A subclass with Linear's forward, and with state and a print of its own."""

    extra_repr = nn.Module.extra_repr  # no sizes

    def __init__(self, size):
        super().__init__(size, size)
        self.calls = 0

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "saved_by_own"] = torch.tensor(self.calls)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.calls = int(state_dict.pop(prefix + "saved_by_own"))
        super()._load_from_state_dict(state_dict, prefix, *args)


def leaf(kind: str) -> nn.Module:
    if kind == "subclass":
        return Scaled(16, 16)
    if kind in ("own class", "falcon", "conv1d"):
        return {"own class": Own, "falcon": partial(FalconLinear, 16), "conv1d": partial(Conv1D, 16)}[kind](16)
    if kind == "norm":
        return nn.LayerNorm(16)
    if kind == "odd":
        return nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16))
    linear = nn.Linear(16, 16, bias=kind != "no bias")
    if kind == "frozen":
        linear.requires_grad_(False)
    if kind == "hooked":
        linear.register_forward_hook(lambda module, args, output: output)
        linear.register_forward_pre_hook(lambda module, args: None)
        linear.register_state_dict_post_hook(lambda module, state, prefix, meta: None)
        linear.register_load_state_dict_pre_hook(lambda *args: None)
        linear.register_full_backward_hook(lambda *args: None)
    if kind == "eval":
        linear.eval()
    if kind == "normed":
        nn.utils.parametrizations.weight_norm(linear)
    return linear


KINDS = [
    "linear", "no bias", "frozen", "hooked", "eval", "normed", "subclass", "own class", "falcon", "conv1d", "norm",
    "odd",
]  # fmt: skip
TREES = st.recursive(st.sampled_from(KINDS), lambda child: st.lists(child, min_size=1, max_size=3), max_leaves=8)


def build(tree) -> nn.Module:
    """Children of any kind, one after the other; every child maps [*, 16] to [*, 16]."""
    return leaf(tree) if isinstance(tree, str) else nn.Sequential(*map(build, tree))


def tie(model: nn.Module, share_module: bool, share_weight: bool) -> None:
    plain = [m for m in model.modules() if type(m) is nn.Linear and m.in_features == m.out_features]
    if share_module and plain:
        model.add_module("again", plain[0])
    if share_weight and len(plain) > 1:
        plain[-1].weight = plain[0].weight


@settings(max_examples=60, deadline=None)
@given(tree=TREES, share_module=st.booleans(), share_weight=st.booleans(), meta=st.booleans())
def test_conversion_keeps_everything(tree, share_module, share_weight, meta):
    model = nn.Sequential(build(tree), nn.Linear(16, 16))
    tie(model, share_module, share_weight)
    if meta:
        model = model.to("meta")
    plain = [m for m in model.modules() if type(m) in (nn.Linear, Own, Conv1D, FalconLinear)]
    classes = [type(m) for m in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plugin = FP8TorchAO()
    with unchanged(model):
        for _ in range(2):
            convert(plugin, model)
            remove_hooks(model)  # those of the modules around converted layers, which note their first run
    converted = coded_layers(model)
    assert {id(m) for m in converted} == {id(m) for m in plain if m.weight.shape == (16, 16)}
    assert all(isinstance(m, cls) for m, cls in zip(model.modules(), classes, strict=True))
    assert {repr(m) for m in model.modules() if isinstance(m, Own)} <= {"FP8Linear_Own()"}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in held for m in converted for p in m.parameters() if p.requires_grad)
    if not meta:
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        output = model(x := torch.randn(5, 16))
        copies = [copy.deepcopy(model)]
        if "hooked" not in str(tree) and "normed" not in str(tree):  # lambdas and parametrizations do not pickle
            copies.append(pickle.loads(pickle.dumps(model)))
        for copied in copies:
            assert [type(m) for m in copied.modules()] == [type(m) for m in model.modules()]
            assert torch.equal(copied(x), output)
    with unchanged(model):
        revert(model)
    assert [type(m) for m in model.modules()] == classes


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False))
    model[0].register_forward_hook(lambda *_: None)
    model[2].weight = model[0].weight
    model[2].eval()
    return model


def replace(model, change):
    """A swap as others do it: a new module in the place of the old one, then spoil one thing."""
    old = model[0]
    new = nn.Linear(16, 16)
    new.weight, new.bias, new._forward_hooks = old.weight, old.bias, old._forward_hooks
    model[0] = new
    change(model)


BROKEN = {
    "the module object": lambda m: replace(m, lambda m: None),
    "the Parameter or buffer object": lambda m: setattr(m[0], "weight", nn.Parameter(m[0].weight.detach().clone())),
    "the Parameter or buffer object of '2.weight'": lambda m: setattr(m[2], "weight", nn.Parameter(torch.ones(16, 16))),
    "the place in parameters()": lambda m: m[0].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "requires_grad": lambda m: m[0].weight.requires_grad_(False),
    "the dtype": lambda m: setattr(m[1].weight, "data", m[1].weight.data.double()),
    "the device": lambda m: m[1].to("meta"),
    "the shape": lambda m: setattr(m[1].weight, "data", torch.ones(4)),
    "train or eval": lambda m: m[2].train(),
    "the hooks": lambda m: m[0]._forward_hooks.clear(),
    "the module object of '2'": lambda m: m.pop(2),
    "the place in the state dict": lambda m: m[0].register_buffer("scale", torch.ones(1)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_swap_is_caught_and_named(what):
    model = hooked()
    said = r"Conversion of Sequential changed .* of '.*keep=\[\.\.\.\]"
    with pytest.raises(RuntimeError, match=said) as caught, unchanged(model):
        BROKEN[what](model)
    named = {"the device": ("the Parameter or buffer object", "the device")}.get(what, (what,))
    named += ("the Parameter or buffer object",) if what.startswith("the place in") else ()
    assert any(f"changed {name} " in str(caught.value) for name in named)
