"""ScaledAdamW against a loop written from the specification, bit for bit; its memory, kernels, state, edges."""

import copy
from collections import Counter

import pytest
import torch
from scaled_reference import Reference, quantise, value
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.optim import ScaledAdamW, scaled_adamw
from lightning_lowprec.optim.rounding import stochastic_round_fp16_
from lightning_lowprec.optim.scaled_weight import scale_weight_, set_values_, values_of

LEVELS = ["O1", "O2", "O3"]
SHAPES = [(33, 17), (5,), (64, 8), (1,), (3, 2, 5)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
every_level = pytest.mark.parametrize("level", LEVELS)


def starts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1.0, 1e-3, 30.0, 1e-6, 0.1]
    return [torch.randn(s, generator=generator) * f for s, f in zip(SHAPES, sizes, strict=True)]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator) * 10.0 ** -(i + step % 3) for i, s in enumerate(SHAPES)]


def scaled_params(level, values=None):
    params = [nn.Parameter(v.clone()) for v in (starts() if values is None else values)]
    for p in params:
        scale_weight_(p, level)
    return params


def give(params, step, coded):
    for p, g in zip(params, gradients(step), strict=True):
        if coded:
            p.scaled.accumulate(g)
        else:
            p.grad = g


def run(optimizer, params, steps, coded=True):
    for step in steps:
        give(params, step, coded)
        optimizer.step()
        optimizer.zero_grad()


def bits(params):
    return [
        (p.detach().clone().view(torch.uint8 if p.itemsize == 1 else torch.int16), p.scaled.scale.item())
        for p in params
    ]


def same(a, b):
    return all(torch.equal(x, y) and s == t for (x, s), (y, t) in zip(a, b, strict=True))


def through_file(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


# ---- the arithmetic


@every_level
@pytest.mark.parametrize("coded", [True, False], ids=["fp8-gradient", "float32-gradient"])
@pytest.mark.parametrize("chunk", [1 << 24, 200])
def test_ten_steps_are_those_of_the_specification(level, coded, chunk, monkeypatch):
    monkeypatch.setattr(scaled_adamw, "_CHUNK", chunk)
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, **OPTIONS)
    references = [Reference(v, level) for v in starts()]
    for step in range(10):
        run(optimizer, params, [step], coded)
        for reference, g in zip(references, gradients(step), strict=True):
            reference.step(value(quantise(g, torch.float8_e4m3fn)) if coded else g, **OPTIONS)
    for p, reference in zip(params, references, strict=True):
        assert torch.equal(p.float(), reference.weight[0].float())
        assert p.scaled.scale.item() == reference.weight[1]
        state = optimizer.state[p]
        if level == "O1":
            assert torch.equal(state["exp_avg"], reference.m)
            assert torch.equal(state["exp_avg_sq"], reference.v)
            continue
        assert state["exp_avg"].dtype == torch.float8_e4m3fn
        assert state["exp_avg_sq"].dtype == torch.float16
        for key, coded_state in {"exp_avg": reference.m, "exp_avg_sq": reference.v}.items():
            assert torch.equal(state[key].float(), coded_state[0].float())
            assert state[f"{key}_scale"].item() == coded_state[1]
        if level == "O3":
            assert torch.equal(state["master"], reference.master[0])
            assert state["master_scale"].item() == reference.master[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_parameters_get_torchs_adamw(dtype):
    ours = [nn.Parameter(v.to(dtype)) for v in starts()]
    # half precision: float32 moments and update, rounded after each step
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer, reference = ScaledAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    for step in range(5):
        for p, q, g in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = g.to(dtype), g.to(dtype).float()
        optimizer.step()
        reference.step()
        for q in theirs:
            q.data = q.data.to(dtype).float()
    assert all(torch.equal(p.float(), q) for p, q in zip(ours, theirs, strict=True))


def test_gradients_of_micro_batches_add_up():
    (p,) = scaled_params("O2", [torch.zeros(64)])
    parts = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    coded = quantise(parts[0], torch.float8_e4m3fn)
    p.scaled.accumulate(parts[0])
    for part in parts[1:]:
        p.scaled.accumulate(part)
        coded = quantise(part + value(coded), torch.float8_e4m3fn)
    assert torch.equal(p.scaled.grad.float() * p.scaled.grad_inv_scale, value(coded))


@every_level
def test_parameters_without_a_gradient_stay_and_count_their_own_steps(level):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, **OPTIONS)
    references = [Reference(v, level) for v in starts()]
    for step in range(6):
        for i, (p, g) in enumerate(zip(params, gradients(step), strict=True)):
            if (step + i) % 3:
                p.grad = g
                references[i].step(g, **OPTIONS)
        optimizer.step()
        optimizer.zero_grad()
    for p, reference in zip(params, references, strict=True):
        assert optimizer.state[p]["step"] == reference.t
        assert torch.equal(p.float(), reference.weight[0].float())


# ---- clipping


def test_clipping_changes_only_the_inv_scale_of_scaled_gradients():
    params, plain = scaled_params("O2"), nn.Parameter(torch.zeros(3))
    optimizer = ScaledAdamW([*params, plain], level="O2")
    give(params, 0, coded=True)
    plain.grad = torch.full((3,), 2.0)
    before = [(p.scaled.grad.clone(), p.scaled.grad_inv_scale.clone()) for p in params]
    values = torch.cat([*((c.float() * i).flatten() for c, i in before), plain.grad])
    norm = optimizer.clip_grad_norm_(0.5)
    assert norm.item() == pytest.approx(values.double().norm().item(), rel=1e-6)
    for p, (codes, inv_scale) in zip(params, before, strict=True):
        assert torch.equal(p.scaled.grad.float(), codes.float())
        assert p.scaled.grad_inv_scale.item() == pytest.approx(inv_scale.item() * 0.5 / norm.item(), rel=1e-5)
    assert plain.grad[0].item() == pytest.approx(2 * 0.5 / norm.item(), rel=1e-5)
    inv_scales = [p.scaled.grad_inv_scale.item() for p in params]
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(0.5, rel=1e-5)
    assert [p.scaled.grad_inv_scale.item() for p in params] == inv_scales


# ---- memory and kernels


@pytest.mark.parametrize(("level", "allowed"), [("O1", 11.1), ("O2", 6.1), ("O3", 7.1)])
def test_bytes_per_parameter(level, allowed):
    (p,) = scaled_params(level, [torch.randn(256, 256)])
    optimizer = ScaledAdamW([p], level=level)
    p.scaled.accumulate(torch.randn(256, 256))
    optimizer.step()
    kept = [p, p.scaled.grad, p.scaled.grad_inv_scale, p.scaled.scale, *optimizer.state[p].values()]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if isinstance(t, torch.Tensor)
    }
    (shelf,) = optimizer._shelves.values()
    workspaces = [b.flat.untyped_storage().nbytes() for b in (*shelf._full.values(), *shelf._codes.values())]
    assert p.grad is None
    assert (sum(storages.values()) + sum(workspaces)) / p.numel() <= allowed


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@every_level
def test_a_step_has_as_many_operations_for_40_parameters_as_for_4(level):
    counts = []
    for number in (4, 40):
        params = scaled_params(level, [torch.randn(16, 16) for _ in range(number)])
        optimizer = ScaledAdamW(params, level=level)
        for p in params:
            p.scaled.accumulate(torch.randn(16, 16))
        optimizer.step()
        with Ops() as ops:
            optimizer.step()
        counts.append(sum(ops.calls.values()))
    assert counts[0] == counts[1]
    assert counts[0] < 200


# ---- stochastic rounding


def test_stochastic_rounding_of_fp16_is_unbiased_between_the_neighbours():
    grid = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16).float()
    grid = grid[grid.isfinite()]
    exact = grid.clone()
    stochastic_round_fp16_(exact, seed=1, step=1)
    assert torch.equal(exact, grid)
    for x in (1.0 + 0.3 * 2**-10, -1.0 - 0.3 * 2**-10, 2.0**-24 * 5.25, 2.0**-20 * 1.01, 65500.0, -3.7e-9):
        values = torch.full((1 << 16,), x)
        stochastic_round_fp16_(values, seed=3, step=7)
        below = grid[grid <= x].max()
        above = grid[grid >= x].min()
        assert set(values.tolist()) <= {below.item(), above.item()}
        width = (above - below).item()
        assert abs(values.double().mean().item() - torch.tensor(x).item()) < 5 * width / 2 / 256


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
    params[0].scaled.grad = None
    params[0].scaled.accumulate(g)
    optimizer.step()
    assert bool(values_of(params[0])[0, 0].isnan())
    assert all(bool(p.scaled.scale.isfinite()) for p in params)
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
        ({"lr": -1.0}, "`lr=-1.0` is not valid"),
        ({"eps": float("nan")}, "`eps=nan` is not valid"),
        ({"betas": (0.9, 1.0)}, "`betas=(0.9, 1.0)` is not valid"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match="is not valid") as error:
        ScaledAdamW([nn.Parameter(torch.ones(2))], **options)
    assert message in str(error.value)


def test_a_parameter_of_another_level_and_one_scaled_twice_are_refused():
    (p,) = scaled_params("O3", [torch.ones(2)])
    with pytest.raises(ValueError, match=r"`level='O2'` is not valid for a parameter of torch.float8_e4m3fn codes"):
        ScaledAdamW([p], level="O2")
    with pytest.raises(ValueError, match="codes already"):
        scale_weight_(p, "O3")
    with pytest.raises(ValueError, match="`level='O9'`"):
        scale_weight_(nn.Parameter(torch.ones(2)), "O9")
