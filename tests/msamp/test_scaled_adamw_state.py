"""ScaledAdamW: stochastic rounding, state, and what happens at the edges."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn

from lightning_lowprec.msamp.adamw import ScaledAdamW, convert_optimizer_
from lightning_lowprec.msamp.weight import scale_weight_, set_values_, values_of
from lightning_lowprec.numerics.rounding import bits_at, keys_of_bits, random_bits, round_fp16
from tests.msamp.scaled_cases import (
    LEVELS,
    OPTIONS,
    accumulate,
    bits,
    every_level,
    give,
    gradients,
    run,
    same,
    scaled_params,
    starts,
    through_file,
)
from tests.msamp.scaled_reference import Reference, quantise, value

# ---- stochastic rounding


def rounded(values, seed, step):
    keys = torch.tensor(keys_of_bits(len(values), seed, step), dtype=torch.int32)
    return round_fp16(values, bits_at(len(values), keys, torch.zeros(2, dtype=torch.int64)))


def test_stochastic_rounding_of_fp16_is_unbiased_between_the_neighbours():
    grid = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    grid = grid[grid.isfinite()]
    assert torch.equal(rounded(grid, seed=1, step=1), grid)
    for x in (1.0 + 0.3 * 2**-10, -1.0 - 0.3 * 2**-10, 2.0**-24 * 5.25, 2.0**-20 * 1.01, 65500.0, -3.7e-9):
        values = rounded(torch.full((1 << 16,), x), seed=3, step=7)
        below = grid[grid <= x].max()
        above = grid[grid >= x].min()
        assert set(values.tolist()) <= {below.item(), above.item()}
        width = (above - below).item()
        assert abs(values.double().mean().item() - torch.tensor(x).item()) < 5 * width / 2 / 256


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


@every_level
@pytest.mark.parametrize("stochastic", [False, True])
def test_resume_is_bit_exact(level, stochastic, tmp_path):
    options = {**OPTIONS, "level": level, "stochastic_rounding": stochastic}
    params = scaled_params(level)
    plain = nn.Parameter(torch.ones(3))
    optimizer = ScaledAdamW([{"params": params}, {"params": [plain], "lr": 1e-2}], **options)
    run(optimizer, params, range(4))
    saved = through_file({"weights": [values_of(p) for p in params], "optimizer": optimizer.state_dict()}, tmp_path)
    fresh = scaled_params(level, starts(seed=1))
    other = nn.Parameter(plain.detach().clone())
    resumed = ScaledAdamW([{"params": fresh}, {"params": [other]}], **options)
    for p, weights in zip(fresh, saved["weights"], strict=True):
        set_values_(p, weights)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.param_groups[1]["lr"] == 1e-2
    for p, q in zip(params, fresh, strict=True):
        for key, tensor in optimizer.state[p].items():
            mine = resumed.state[q][key]
            assert mine == tensor if key == "step" else torch.equal(mine.float(), tensor.float()), key
            assert key == "step" or mine.dtype == tensor.dtype
    run(optimizer, params, range(4, 8))
    run(resumed, fresh, range(4, 8))
    assert same(bits(params), bits(fresh))


def test_the_state_of_another_optimizer_is_refused():
    source = [nn.Parameter(v) for v in starts()]
    sgd = torch.optim.SGD(source, momentum=0.9)
    give(source, 0, coded=False)
    sgd.step()
    adamw = ScaledAdamW(scaled_params("O2"), level="O2")
    state = {**adamw.state_dict(), "state": sgd.state_dict()["state"]}
    with pytest.raises(ValueError, match=r"holds momentum_buffer; expected that of an optimizer with exp_avg, "):
        adamw.load_state_dict(state)


@every_level
@pytest.mark.parametrize("origin", [*LEVELS, "AdamW"])
def test_the_state_of_another_level_or_of_adamw_loads(level, origin, tmp_path):
    if origin == "AdamW":
        source = [nn.Parameter(v) for v in starts()]
        optimizer = torch.optim.AdamW(source, **OPTIONS)
        give(source, 0, coded=False)
        optimizer.step()
    else:
        source = scaled_params(origin)
        optimizer = ScaledAdamW(source, level=origin, **OPTIONS)
        run(optimizer, source, [0])
    params = scaled_params(level)
    target = ScaledAdamW(params, level=level, **OPTIONS)
    target.load_state_dict(through_file(optimizer.state_dict(), tmp_path))
    for p, q in zip(source, params, strict=True):
        assert target.state[q]["step"] == 1
        for key in ("exp_avg", "exp_avg_sq"):
            a, b = optimizer.state[p], target.state[q]
            before = a[key].float() / a.get(f"{key}_scale", 1.0)
            after = b[key].float() / b.get(f"{key}_scale", 1.0)
            assert torch.allclose(after, before, rtol=2.0**-4, atol=before.abs().max().item() * 2.0**-15)
    run(target, params, [1])
    assert all(bool(values_of(p).isfinite().all()) for p in params)


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


def test_a_copy_keeps_the_options():
    params = scaled_params("O1")
    optimizer = ScaledAdamW(params, level="O1", stochastic_rounding=True, seed=5)
    run(optimizer, params, [0])
    clone = copy.deepcopy(optimizer)
    assert (clone.level, clone.stochastic_rounding, clone.seed) == ("O1", True, 5)


# ---- edges


@every_level
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_seen_in_the_weight_and_scales_stay_finite(level, bad):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level)
    run(optimizer, params, [0])
    give(params, 1, coded=True)
    g = gradients(1)[0]
    g[0, 0] = bad
    params[0].grad = None
    accumulate(params[0], g)
    optimizer.step()
    assert bool(values_of(params[0])[0, 0].isnan())
    assert all(bool(p.msamp_state.scale.isfinite()) for p in params)
    assert bool(values_of(params[1]).isfinite().all())


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


def test_a_closure_is_run_and_its_loss_returned():
    p = nn.Parameter(torch.ones(2))
    optimizer = ScaledAdamW([p], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert torch.allclose(p, torch.full((2,), 0.9))


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
