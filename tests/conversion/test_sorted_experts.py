"""Experts in the manner of torchtitan: tokens that are sorted already, three stacked Parameters, counts of tokens."""

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_lowprec import FP8TorchAO, HalfMixed, plain, plan
from tests.quality import expect_db, sqnr

EXPERTS, DIM, HIDDEN = 4, 32, 64
COUNTS = (7, 0, 21, 12)


class GroupedExperts(nn.Module):
    """Written after torchtitan's description: a loop, or grouped products, of which only the loop pads."""

    def __init__(self, dim=DIM, hidden=HIDDEN, use_grouped_mm=True):
        super().__init__()
        self.num_experts, self.use_grouped_mm = EXPERTS, use_grouped_mm
        self.w1 = nn.Parameter(torch.empty(EXPERTS, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(EXPERTS, hidden, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x, num_tokens_per_expert):
        if self.use_grouped_mm:
            if x.device.type == "cpu":
                raise RuntimeError("kernels that sort and pad need CUDA")
            raise NotImplementedError
        parts = x[: num_tokens_per_expert.sum()].split(num_tokens_per_expert.tolist())
        out = [self.expert(part, *weights) for part, *weights in zip(parts, self.w1, self.w3, self.w2, strict=True)]
        padding = x.new_zeros(len(x) - int(num_tokens_per_expert.sum()), x.shape[1])
        return torch.cat([*out, padding])

    def expert(self, x, gate, up, down):
        return self.between(x @ gate.T, x @ up.T) @ down.T

    def between(self, gate, up):
        return F.silu(gate) * up


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *args):
        return self.experts(*args)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(COUNTS) + 5, DIM, generator=generator), torch.tensor(COUNTS)


def run(model, x, *args):
    """Return output and gradients; the loss does not read the rows behind the counts."""
    x = x.clone().requires_grad_()
    output = model(x, *args)
    target = torch.randn(sum(COUNTS), DIM, generator=torch.Generator().manual_seed(2))
    (output.float()[: sum(COUNTS)] * target).sum().backward()
    grads = {name.rpartition(".")[2]: p.grad for name, p in model.named_parameters()}
    return {"output": output.detach().float(), "x": x.grad, **grads}


def set_up(model, plugin):
    return L.Fabric(plugins=plugin, accelerator="cpu").setup(model)


def reasons(model):
    return {row.kept_because for row in plan(model).rows}


PRECISIONS = {
    "bf16": (lambda: HalfMixed("bf16"), 40.0),
    "tensorwise": (lambda: FP8TorchAO(recipe="tensorwise"), 23.0),
    "rowwise": (lambda: FP8TorchAO(recipe="rowwise"), 23.0),
    "rowwise_with_gw_hp": (lambda: FP8TorchAO(recipe="rowwise_with_gw_hp"), 23.0),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_values_and_gradients_are_those_of_the_loop(name):
    plugin, least = PRECISIONS[name]
    torch.manual_seed(0)
    experts = GroupedExperts(use_grouped_mm=False)
    x, counts = batch()
    expected = run(Layer(copy.deepcopy(experts)), x, counts)
    experts.use_grouped_mm = True  # the module's own code raises on CPU, so what runs is ours
    wrapped = set_up(Layer(experts), plugin())
    got = run(wrapped, x, counts.float())  # torchtitan's router counts by `histc`
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        expect_db(sqnr(value, got[key]), least, key)
    assert not got["output"][sum(COUNTS) :].any()
    assert not got["x"][sum(COUNTS) :].any()
    with pytest.raises(ValueError, match=r"has the shape \(3,\), and this rank has 4 experts; expected \(4,\)"):
        wrapped(x, counts[:3])


def namesake(**members):
    """Return a class of another project that has the same name."""
    return type("GroupedExperts", (GroupedExperts,), members)


def test_bits_are_those_of_experts_of_transformers():
    """The same weights, with gate and up in one Parameter; only the gradient of the tokens is summed in another way."""
    torch.manual_seed(0)
    experts, (x, counts) = GroupedExperts(), batch()
    x = x[: sum(COUNTS)]
    config = MixtralConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    routed = MixtralExperts(config)
    with torch.no_grad():
        routed.gate_up_proj.copy_(torch.cat((experts.w1, experts.w3), dim=1))
        routed.down_proj.copy_(experts.w2)
    index = torch.repeat_interleave(torch.arange(EXPERTS), counts).unsqueeze(1)
    got = run(set_up(Layer(experts), FP8TorchAO(recipe="rowwise")), x, counts)
    expected = run(set_up(Layer(routed), FP8TorchAO(recipe="rowwise")), x, index, torch.ones(len(x), 1))
    assert torch.equal(got["output"], expected["output"])
    assert torch.equal(torch.cat((got["w1"], got["w3"]), dim=1), expected["gate_up_proj"])
    assert torch.equal(got["w2"], expected["down_proj"])
    expect_db(sqnr(expected["x"], got["x"]), 28.0)


def test_autocast_casts_products_of_other_dtypes(monkeypatch):
    """A module whose own grouped products run in the dtype of its weights, whatever autocast says."""

    def forward(self, x, num_tokens_per_expert):
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        gate, up = (F.grouped_mm(x.float(), weight.mT, offs=ends) for weight in (self.w1, self.w3))
        return F.grouped_mm(F.silu(gate) * up, self.w2.mT, offs=ends).type_as(x)

    model, (x, counts) = Layer(namesake(forward=forward)()), batch()
    seen, multiply = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, **kw: (seen.append((a.dtype, b.dtype)), multiply(a, b, **kw))[1])
    expected = model(x, counts)[: sum(COUNTS)].detach()
    del seen[:]
    got = set_up(model, HalfMixed("bf16"))(x, counts)[: sum(COUNTS)].detach().float()
    assert seen[-3:] == [(torch.bfloat16, torch.bfloat16)] * 3, "the others are small examples"
    assert len(seen) % 3 == 0
    expect_db(sqnr(expected, got), 40.0)
    plain(model)
    assert type(model.experts).forward is forward


def _swapped(self, x, num_tokens_per_expert):  # [E, K, N], as in the first versions of torchtitan; here K equals N
    parts = x.split(num_tokens_per_expert.tolist())
    out = [(F.silu(p @ w1) * (p @ w3)) @ w2 for p, w1, w3, w2 in zip(parts, self.w1, self.w3, self.w2, strict=True)]
    return torch.cat(out)


def test_products_in_bfloat16_are_those_of_the_formula():
    def expert(self, *tensors):
        return GroupedExperts.expert(self, *(tensor.bfloat16() for tensor in tensors)).float()

    assert reasons(Layer(namesake(expert=expert)(use_grouped_mm=False))) == {None}


DIFFERENT = {
    "an error of three percent": namesake(expert=lambda self, *tensors: GroupedExperts.expert(self, *tensors) * 1.03),
    "gelu": namesake(between=lambda self, gate, up: F.gelu(gate) * up),
    "gate and up swapped": namesake(between=lambda self, gate, up: gate * F.silu(up)),
    "a factor": namesake(between=lambda self, gate, up: 1.02 * F.silu(gate) * up),
    "no gate": namesake(expert=lambda self, x, gate, up, down: F.silu(x @ gate.T) @ down.T),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_computes_something_else_stays_as_it_is(name):
    model, (x, counts) = Layer(DIFFERENT[name](use_grouped_mm=False)), batch()
    assert reasons(model) == {"GroupedExperts that do not compute w2(silu(w1 x) * w3 x)"}
    cls, expected = type(model.experts), model(x, counts).detach()
    wrapped = set_up(model, HalfMixed("bf16"))
    assert type(model.experts) is cls
    expect_db(sqnr(expected, wrapped(x, counts).detach().float()), 40.0)


def test_other_layouts_and_arguments_stay_as_they_are():
    square = Layer(namesake(forward=_swapped)(dim=DIM, hidden=DIM))
    assert reasons(square) == {"GroupedExperts, whose forward fails for a small example (RuntimeError)"}
    replaced = Layer(GroupedExperts())
    replaced.experts.forward = lambda x, counts: x
    assert reasons(replaced) == {"its forward is replaced on the instance"}
    odd = Layer(GroupedExperts(dim=24, use_grouped_mm=False))
    assert reasons(odd) == {"features are no multiples of 16"}
    more = Layer(GroupedExperts())
    more.experts.bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
    arguments = Layer(namesake(forward=lambda self, x, counts, scores=None: x)())
    for model in (more, arguments):
        (reason,) = reasons(model)
        assert reason.startswith("stacked experts of an unknown class (GroupedExperts); autocast leaves grouped")


def test_recognising_draws_no_random_number_and_leaves_the_module_alone():
    model = Layer(GroupedExperts()).to("meta")
    state, before = torch.get_rng_state(), dict(vars(model.experts))
    with torch.device("meta"):  # as `torch.set_default_device` of a program
        planned = plan(model)
    assert planned.converted == planned.stacked == ("experts.w1", "experts.w2", "experts.w3")
    assert {row.fqn: (row.in_features, row.out_features) for row in planned.rows} == {
        "experts.w1": (DIM, HIDDEN),
        "experts.w2": (HIDDEN, DIM),
        "experts.w3": (DIM, HIDDEN),
    }
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(model.experts) == before
