"""Remainders are exact and stochastic rounding is unbiased, on bit patterns."""

import pytest
import torch

from lightning_lowprec.numerics import rounding
from lightning_lowprec.numerics.rounding import join_, random_bits, reconcile, split_, stochastic_round_

NAN = float("nan")


def floats(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    upper = master.clone()
    remainder = torch.empty(master.shape, dtype=torch.int16)
    split_(upper, remainder)
    return upper.to(torch.bfloat16), remainder


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    master = weight.float().contiguous()
    join_(master, remainder.contiguous())
    return master


def stochastic_round(values: torch.Tensor, *, seed: int, step: int, start: int = 0) -> torch.Tensor:
    flat = values.reshape(-1).clone()
    stochastic_round_(flat, seed=seed, step=step, start=start)
    return flat.to(torch.bfloat16).view(values.shape)


def every_bf16() -> torch.Tensor:
    return torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


EDGES = (-0x8000, -0x7FFF, -0x4001, -2, -1, 0, 1, 2, 3, 0x3FFF, 0x7FFE, 0x7FFF)
GRID = sorted({*EDGES, *range(-0x8000, 0x8000, 1021)})


@pytest.mark.parametrize("remainders", [GRID[i::4] for i in range(4)])
def test_every_bf16_with_a_grid_of_remainders(remainders):
    for r in remainders:
        weight = every_bf16()
        remainder = torch.full(weight.shape, r, dtype=torch.int16)
        master = join(weight, remainder)
        arises = ~(weight.isnan() | master.isnan() | ((weight == 0) & (remainder < 0)))
        assert arises.sum() > 65000
        again, rest = split(master)
        assert torch.equal(bits_of(again)[arises], bits_of(weight)[arises])
        assert torch.equal(rest[arises], remainder[arises])
        assert torch.equal(weight.isnan(), weight.isnan() & master.isnan() & again.isnan())


def test_zeros_bf16_values_and_what_is_not_finite_stay():
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0]).bfloat16()
    master = join(zeros, torch.tensor([-1, -0x8000, 5, 0], dtype=torch.int16))
    assert master.isfinite().all()
    assert master.abs().max() < 1e-38
    every = every_bf16()
    rounded = stochastic_round(every.float(), seed=0, step=5)
    nan = every.isnan()
    assert torch.equal(bits_of(rounded)[~nan], bits_of(every)[~nan])
    assert bool(rounded[nan].isnan().all())
    tricky = floats(0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001)  # NaNs that adding would turn into inf or zero
    for step in range(20):
        assert bool(stochastic_round(tricky, seed=0, step=step).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reconcile_keeps_the_master_where_it_rounds_to_the_weight(dtype):
    master = torch.tensor([1.0001, 1.0001, -1.0, 0.0, 3e-5, NAN, 2.0])
    weight = torch.tensor([1.0001, 2.0, 1.0, -0.0, 3e-5, 1.0, NAN]).to(dtype)
    merged = reconcile(master, weight)
    assert torch.equal(merged[:6], torch.tensor([1.0001, 2.0, 1.0, 0.0, 3e-5, 1.0]))
    assert torch.equal(reconcile(master, weight.float())[:6], merged[:6]), "a rounding to either, in float32"
    assert merged[6].isnan()


N = 1 << 20


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fraction", [1 / 65536, 0.01, 0.5])
def test_unbiased(fraction, sign):
    """The share of values rounded away from zero is a mean of N Bernoulli draws: within 5 sigma of its expectation."""
    value = floats(0x3F800000 + round(fraction * 65536)) * sign
    fraction = round(fraction * 65536) / 65536
    rounded = stochastic_round(value.expand(N), seed=3, step=11)
    up = (rounded == floats(0x3F810000).bfloat16() * sign).double()
    assert bool(((rounded == sign) | (up == 1)).all())
    assert abs(up.mean().item() - fraction) < 5 * (fraction * (1 - fraction) / N) ** 0.5


def test_random_bits_are_pinned():
    """The bits are part of what a resumed run needs: changing the hash is a breaking change."""
    assert random_bits(5, 0, 0, 0).tolist() == [41283, 47215, 52513, 22686, 21302]
    assert random_bits(5, 0, 0, 0).dtype == torch.int32


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"start": 8}])
def test_every_number_in_the_counter_matters(other):
    same = {"seed": 0, "step": 0, "start": 0}
    x = torch.rand(1000) + 1
    assert torch.equal(stochastic_round(x, **same), stochastic_round(x, **same))
    assert not torch.equal(stochastic_round(x, **same), stochastic_round(x, **{**same, **other}))


def test_chunks_do_not_share_bits_and_a_shard_that_begins_within_one_is_rounded_as_in_the_whole(monkeypatch):
    monkeypatch.setattr(rounding, "_CHUNK", 1000)
    value = floats(0x3F808000).expand(4000)
    whole = stochastic_round(value, seed=0, step=0)
    for start in (1, 700, 1000, 2501):
        assert torch.equal(stochastic_round(value[start:], seed=0, step=0, start=start), whole[start:]), start
    assert len({tuple(part.tolist()) for part in whole.view(4, 1000)}) == 4
    bits = rounding.bits_of_positions(3300, 0, 0, 700, value.device)
    assert torch.equal((value[700:].view(torch.int32) + bits) >> 16, whole[700:].view(torch.int16).to(torch.int32))
    master = torch.randn(4001)
    assert torch.equal(join(*split(master)), master)
