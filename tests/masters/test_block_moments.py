"""Moments of 8 bits, without Lightning: values, memory, state dicts, copies."""

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_lowprec import MasterConfig
from lightning_lowprec.masters import moments
from lightning_lowprec.masters.optimizer import add_masters, remove_masters
from lightning_lowprec.masters.weights import cast_parameters
from tests.masters.master_loops import WIDE, equal, every_form, net, step, train, two_groups, wrapped


def eight_bits(make=two_groups, **config):
    return wrapped(make, MasterConfig(**{"moments": "8bit", "form": "remainder", **config}), sizes=WIDE)


@every_form
def test_the_state_between_steps_is_what_it_says(form):
    model, optimizer = eight_bits(form=form)
    train(model, optimizer, range(1))
    state = optimizer.state[model[0].weight]
    assert {name: value.dtype for name, value in state.items()} == {
        "step": torch.float32,
        "exp_avg_codes": torch.float8_e4m3fn, "exp_avg_exponents": torch.uint8,
        "exp_avg_sq_codes": torch.uint8, "exp_avg_sq_exponents": torch.uint8,
    }  # fmt: skip
    assert state["exp_avg_codes"].shape == (64, 64)
    assert state["exp_avg_exponents"].shape == (64, 1)
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32, "one dimension"
    for each in (optimizer, add_masters(two_groups(model.parameters()), form)):  # also before its first step
        held = [store.flat.untyped_storage().nbytes() for store in each._masters.stores]
        assert sum(held) == (0 if form != "fp32" else 4 * sum(p.numel() for p in model.parameters()))
    extra = sum(store.remainder.nbytes for store in optimizer._masters.stores if form == "remainder")
    assert extra == (2 * sum(p.numel() for p in model.parameters()) if form == "remainder" else 0)


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, momentum=0.9),
        torch.optim.Adam,
        partial(torch.optim.AdamW, amsgrad=True),
        partial(torch.optim.RMSprop, centered=True, momentum=0.9),
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.Muon,
    ],
    ids=lambda make: getattr(make, "func", make).__name__,
)
def test_every_coded_state_of_an_optimizer_is_that_of_float32(make):
    """Gradients have both signs: each rounding makes a difference of 0.037, and the last four steps count most."""
    torch.manual_seed(0)
    coded, exact = nn.Parameter(torch.zeros(64, 64).bfloat16()), nn.Parameter(torch.zeros(64, 64))
    ours, stock = add_masters(make([coded], lr=1e-3), MasterConfig(moments="8bit")), make([exact], lr=1e-3)
    for _ in range(4):
        coded.grad = torch.randn(64, 64).bfloat16()
        exact.grad = coded.grad.float()
        ours.step()
        stock.step()
    assert any(name.endswith("_codes") for name in ours.state[coded])
    found = add_masters(make([nn.Parameter(coded.detach().clone())], lr=1e-3), MasterConfig())
    found.load_state_dict(ours.state_dict())
    remove_masters(ours)
    (state,) = found.state.values()
    assert equal(ours.state[coded], state)
    for name, value in stock.state[exact].items():
        if torch.is_tensor(value) and value.dim() == 2:
            assert (state[name] - value).norm() <= 0.12 * value.norm(), name


@pytest.mark.parametrize(("form", "moments"), [("remainder", "fp32"), ("stochastic", "8bit"), ("fp32", "8bit")])
def test_copies_and_pickles_train_on(form, moments):
    model, optimizer = eight_bits(form=form, moments=moments)
    train(model, optimizer, range(2))
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    before = [p.detach().clone() for p in model.parameters()]
    for other, its in copies:
        train(other, its, range(2, 4))
    assert equal([p.detach() for p in model.parameters()], before), "the copies have weights of their own"
    train(model, optimizer, range(2, 4))
    for other, its in copies:
        assert equal(other.state_dict(), model.state_dict())
        assert equal(its.state_dict()["state"], optimizer.state_dict()["state"])


def test_moments_of_which_ranks_have_unequal_parts_of_rows_stay_float32():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    cuts = {(64, 65): Shard(1), (64, 2, 64): Shard(2), (64, 128): Shard(1), (65, 64): Shard(0), (65, 96): Replicate()}
    params = [distribute_tensor(torch.ones(shape), mesh, [cut]) for shape, cut in cuts.items()]
    assert [*map(moments.block_of, params)] == [0, 0, 64, 64, 32]


def test_the_codes_of_a_loaded_state_dict_are_not_written_to():
    model, optimizer = eight_bits()
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    other, loaded = eight_bits()
    loaded.load_state_dict(state)
    assert equal(loaded.state[other[0].weight], optimizer.state[model[0].weight]), "codes, not float32 values"
    train(other, loaded, range(2, 4))
    mixed = net(sizes=WIDE)
    cast_parameters(mixed, torch.bfloat16, keep=False, skip={"0.weight"})
    loaded = add_masters(two_groups(mixed.parameters()), MasterConfig(form="remainder", moments="8bit"))
    smaller = copy.deepcopy(kept)
    smaller["state"][2]["exp_avg_exponents"] = kept["state"][2]["exp_avg_exponents"].repeat_interleave(2, 1)  # blocks
    loaded.load_state_dict(smaller)
    assert {*loaded.state[mixed[0].weight]} == {*loaded.state[mixed[2].weight]} == {"step", "exp_avg", "exp_avg_sq"}
    step(loaded, mixed[0].weight, mixed[2].weight, grad=1.0)
    assert [loaded.state[p]["step"].item() for p in mixed.parameters()] == [3, 2, 3, 2], "without a gradient"
    assert "exp_avg" in loaded.state[mixed[0].weight], "of a float32 weight"
    assert "exp_avg_codes" in loaded.state[mixed[2].weight]
    for name in ("exp_avg_codes", "exp_avg_exponents", "exp_avg_sq_codes", "exp_avg_sq_exponents"):
        assert equal(state["state"][0][name], kept["state"][0][name]), name


class OwnSGD(torch.optim.SGD):
    """An optimizer of a user, with an average of weights, and a second state of the values of the first."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("z", p.detach().clone()).lerp_(p.detach(), 0.1)
            self.state[p]["exp_avg"] = self.state[p]["momentum_buffer"].clone()


@pytest.mark.parametrize(
    ("make", "kept", "coded"),
    [
        (torch.optim.ASGD, {"ax"}, set()),
        (torch.optim.Rprop, {"prev", "step_size"}, set()),
        (partial(OwnSGD, momentum=0.9), {"z"}, {"momentum_buffer", "exp_avg"}),
        (
            partial(torch.optim.RMSprop, momentum=0.9, centered=True),
            set(),
            {"momentum_buffer", "square_avg", "grad_avg"},
        ),
        (torch.optim.Adafactor, set(), set()),
    ],
)
def test_what_is_not_known_to_be_an_average_of_gradients_stays_float32_with_a_warning(make, kept, coded, caught):
    moments._warn_of_float32.cache_clear()
    model, optimizer = eight_bits(lambda params: make([list(params)[2]]))
    train(model, optimizer, range(2), closure=True)
    named = ", ".join(f"`{name}`" for name in sorted(kept))
    assert [str(w.message).split(" stays float32")[0] for w in caught] == (
        [f"`moments='8bit'`: the optimizer's state {named}"] if kept else []
    )
    state = optimizer.state[model[2].weight]
    assert {name.removesuffix("_codes") for name in state if name.endswith("_codes")} == coded
    assert all(state[name].dtype == torch.float32 for name in kept)


@pytest.mark.parametrize("form", ["fp32", None], ids=["masters", "float32 weights"])
def test_norms_of_updates_in_the_backward_pass_leave_the_groups_with_a_log_line_and_a_users_option_stays(form, caplog):
    model, optimizer = eight_bits()
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"clip_norm": 1.0, "last_norm": 3.0}
    other = two_groups(net(sizes=WIDE).parameters())
    if form is None:
        moments.decode_on_load(other)
    else:
        _, other = eight_bits(form=form, moments="fp32")
    with caplog.at_level("INFO"):
        other.load_state_dict(saved)
    assert "updated weights in the backward pass" in caplog.text
    assert not {"clip_norm", "last_norm"} & other.param_groups[0].keys()
    assert saved["param_groups"][0]["last_norm"] == 3.0, "the caller's"
    _, optimizer = eight_bits()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["clip_norm"] = 1.0
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["clip_norm"] == 1.0


@pytest.mark.filterwarnings("ignore:.*the optimizer's state `z` stays float32")
@pytest.mark.parametrize(("form", "moments"), [("stochastic", "fp32"), ("remainder", "8bit"), ("fp32", "8bit")])
def test_two_steps_of_a_users_optimizer_round_by_other_random_bits(form, moments):
    weight, larger = nn.Parameter(torch.ones(64, 64).bfloat16()), []
    optimizer = add_masters(OwnSGD([weight], lr=1.0, momentum=0.5), MasterConfig(form=form, moments=moments))
    for _ in range(2):
        optimizer.state.clear()
        weight.data.fill_(1.0)
        weight.grad = torch.full_like(weight, -17 * 2.0**-12)  # about half way between two weights, and two codes
        optimizer.step()
        state = optimizer.state[weight]
        for codes in [state[name] for name in state if name.endswith("_codes")] or [weight.detach()]:
            rounded = codes.float().abs()
            larger.append(rounded > rounded.mean())
    assert not any(torch.equal(*pair) for pair in itertools.combinations(larger, 2))
    assert all(0.4 < some.float().mean() < 0.6 for some in larger)


def test_an_edit_before_the_optimizer_is_loaded_outlives_loaded_masters():
    w = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = torch.optim.SGD([w, nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)  # one without state
    moments.decode_on_load(optimizer)
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": torch.zeros(2), "master_param": torch.tensor([1.0009, 2.0])}}
    with torch.no_grad():
        w[1] = 5.0
    optimizer.load_state_dict(state)
    assert w[1] == 5.0
