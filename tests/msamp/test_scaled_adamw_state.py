"""ScaledAdamW: stochastic rounding, state, and what happens at the edges."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp.adamw import ScaledAdamW, convert_optimizer_
from lightning_lowprec.msamp.weight import scale_weight_, set_values_, values_of
from lightning_lowprec.numerics.rounding import bits_at, keys_of_bits, random_bits
from tests.msamp.scaled_cases import (
    LEVELS,
    OPTIONS,
    every_level,
    give,
    gradients,
    run,
    scaled_params,
    starts,
)
from tests.msamp.scaled_reference import Reference, quantise, value

# ---- stochastic rounding


def test_bits_by_keys_are_those_by_chunks_of_positions():
    chunk, count, start = 1 << 22, (1 << 22) + 6, 24
    keys = torch.tensor([(0, 0), *keys_of_bits(count, 3, 7, start)], dtype=torch.int32)
    expected = [random_bits(part, 3, 7, start + at, "cpu") for at, part in ((0, chunk), (chunk, 6))]
    assert torch.equal(bits_at(count, keys, torch.tensor([0, 1])), torch.cat(expected))
    assert torch.equal(bits_at(9, keys, torch.tensor([chunk - 3, 1])), torch.cat(expected)[chunk - 3 :])


@every_level
def test_steps_with_stochastic_rounding_are_those_of_the_specification(level):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, stochastic_rounding=True, seed=5, **OPTIONS)
    references = [Reference(v, level) for v in starts()]
    for step in range(5):
        run(optimizer, params, [step])
        position = 0
        for reference, g in zip(references, gradients(step), strict=True):
            bits = random_bits(2048, 5, step + 1, 0)[position:][: g.numel()].view(g.shape)
            reference.step(value(quantise(g, torch.float8_e4m3fn)), **OPTIONS, bits=bits)
            position += -(-g.numel() // 8) * 8
    for p, reference in zip(params, references, strict=True):
        codes, scale = p.msamp_state.for_products()
        assert torch.equal(codes.float(), reference.weight[0].float())
        assert torch.equal(p.msamp_state.codes, reference.master[0])
        assert scale.item() == reference.weight[1]


def small_updates(**options):
    (p,) = scaled_params("O2", [torch.ones(4096)])
    optimizer = ScaledAdamW([p], lr=1e-5, betas=(0.0, 0.0), weight_decay=0.0, **options)
    for _ in range(20):  # each moves the weight by 1e-5 of 1, where float16 has 2**-11 between its numbers
        p.grad = torch.ones(4096)
        optimizer.step()
    return values_of(p)


def test_stochastic_rounding_keeps_small_updates_and_repeats_itself():
    assert bool((small_updates() == 1.0).all())
    moved = small_updates(stochastic_rounding=True)
    assert moved.mean().item() == pytest.approx(1 - 20e-5, abs=4e-5)  # 5 standard errors
    assert torch.equal(moved, small_updates(stochastic_rounding=True))
    assert not torch.equal(moved, small_updates(stochastic_rounding=True, seed=1))


# ---- state


def test_the_state_of_another_optimizer_is_refused():
    source = [nn.Parameter(v) for v in starts()]
    sgd = torch.optim.SGD(source, momentum=0.9)
    give(source, 0, coded=False)
    sgd.step()
    adamw = ScaledAdamW(scaled_params("O2"), level="O2")
    state = {**adamw.state_dict(), "state": sgd.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"holds momentum_buffer; expected that of an optimizer with exp_avg, "):
        adamw.load_state_dict(state)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("restored", ["loaded", "copied", "pickled"])
def test_the_way_of_the_decay_is_restored_as_torch_does(kind, restored):
    """An AdamW that loads the state of an Adam stays an AdamW; an Adam stays an Adam in copies."""
    optimizer, plain = kind(scaled_params("O2"), **OPTIONS), kind([nn.Parameter(v) for v in starts()], **OPTIONS)
    convert_optimizer_(optimizer, "O2")
    if restored == "loaded":
        saved = torch.optim.Adam([nn.Parameter(v) for v in starts()], **OPTIONS).state_dict()
        optimizer.load_state_dict(saved)
        plain.load_state_dict(saved)
    else:
        optimizer = copy.deepcopy(optimizer) if restored == "copied" else pickle.loads(pickle.dumps(optimizer))
    (group,), (expected,) = optimizer.param_groups, plain.param_groups
    assert group["decoupled_weight_decay"] is expected["decoupled_weight_decay"] is (kind is torch.optim.AdamW)


# ---- edges


@every_level
def test_zero_weights_and_zero_gradients(level):
    params = scaled_params(level, [torch.zeros(8), torch.zeros(0)])
    optimizer = ScaledAdamW(params, level=level)
    for p in params:
        p.grad = torch.zeros(p.shape)
    optimizer.step()
    assert values_of(params[0]).tolist() == [0.0] * 8


def test_values_come_back_exactly():
    for level in LEVELS:
        for p in scaled_params(level):
            values = values_of(p)
            set_values_(p, values)
            assert torch.equal(values_of(p), values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O4"}, "`level='O4'` is not valid; expected one of: O1, O2, O3."),
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"eps": float("nan")}, "Invalid epsilon value: nan"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
        ({"amsgrad": True}, "`amsgrad=True` of ScaledAdamW is not possible with MS-AMP."),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ScaledAdamW([nn.Parameter(torch.ones(2))], **options)


def test_a_parameter_of_another_level_and_one_scaled_twice_are_refused():
    (p,) = scaled_params("O3", [torch.ones(2)])
    with pytest.raises(ValueError, match=r"`level='O2'` is not valid for a parameter of torch.float8_e4m3fn codes"):
        ScaledAdamW([p], level="O2")
    with pytest.raises(ValueError, match="codes already"):
        scale_weight_(p, "O3")
    with pytest.raises(ValueError, match="`level='O9'`"):
        scale_weight_(nn.Parameter(torch.ones(2)), "O9")
