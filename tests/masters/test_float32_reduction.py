"""float32 accumulation and reduction under DDP: two gloo processes, against float64 sums over all micro-batches."""

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_lowprec import HalfMixed
from tests.fsdp2.ranks import run
from tests.masters.accumulation import (
    FLOAT32,
    FORMS,
    Net,
    batches,
    exact_sum,
    flat,
    float32_bound,
    loss_of,
    relative_error,
)
from tests.masters.float32_reduction_runs import worker

pytestmark = pytest.mark.distributed
COUNT = 8
SEQUENCES = [f"{where} {form}" for where in ("trainer", "fabric") for form in FORMS]
OPTIONS = ["plain", "views", "unused", "small-buckets"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both ranks saw."""
    return run(worker, 2, tmp_path_factory.mktemp("ranks"))


def exact_mean(dtype=torch.bfloat16, scale=1.0):
    """The mean over both ranks of the float64 sums over their micro-batches, and of the magnitudes."""
    of_ranks = [exact_sum(batches(COUNT, seed=rank), dtype, scale) for rank in (0, 1)]
    return [[(a + b) / 2 for a, b in zip(*parts, strict=True)] for parts in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("case", SEQUENCES)
def test_the_mean_is_as_exact_as_float32(ranks, case):
    fp16 = case.endswith("fp16-master")
    exact, magnitudes = exact_mean(torch.float16, 8.0) if fp16 else exact_mean()
    for rank in ranks:
        (given,) = rank[case]
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)


@pytest.mark.parametrize("where", ["trainer", "fabric"])
def test_without_the_option_it_is_not(ranks, where):
    exact, _ = exact_mean()
    half, whole = ranks[0][f"half {where}"][0], ranks[0][f"{where} bf16-master"][0]
    assert relative_error(half, exact) > 1000 * relative_error(whole, exact)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_ddp(ranks, option):
    exact, magnitudes = exact_mean()
    (given,) = ranks[0][f"options {option}"]
    assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)


def test_synchronising_after_every_micro_batch(ranks):
    exact, magnitudes = exact_mean()
    (given,) = ranks[0]["sync-always"]
    assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 3 * COUNT)


@pytest.mark.parametrize("case", ["manual", "clipped"])
def test_clipping(ranks, case):
    exact, _ = exact_mean()
    norm = flat(exact).norm()
    assert norm > 0.5
    (given,) = ranks[0][case]
    assert relative_error(given, [g * 0.5 / norm for g in exact]) < 1e-5  # clip_grad_norm_ divides by norm + 1e-6


@pytest.mark.parametrize("case", ["unused", "unused-reduce"])
def test_unused_parameters(ranks, case):
    """`never` has no gradient; `sometimes` that of rank 0 in its first micro-batch, halved, exactly."""
    net, _, sometimes = Net(), torch.nn.Linear(16, 8), torch.nn.Linear(16, 8).bfloat16()
    net.layers[1].bfloat16(), net.layers[3].bfloat16()
    batch = batches(2, seed=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(net(batch) + sometimes(batch), batch)
    expected = [grad.float() / 2 for grad in torch.autograd.grad(loss, list(sometimes.parameters()))]
    for rank in ranks:
        has, *grads = rank[case][0]
        assert has.tolist() == [True] * 6 + [False] * 2 + [True] * 2
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_a_mean_that_fp16_has_and_its_halves_have_not(ranks):
    for rank in ranks:
        assert torch.equal(rank["tiny"]["half"]["given"], torch.zeros(2))
        for how in ("reduce", "accumulate"):
            assert torch.equal(rank["tiny"][how]["given"], torch.full((2,), 2.0**-24))
        dtypes = {how: tiny["dtype"] for how, tiny in rank["tiny"].items()}
        assert dtypes == {"half": "torch.float16", "reduce": "torch.float16", "accumulate": "torch.float32"}


def test_two_modules_accumulate_side_by_side(ranks):
    for rank in ranks:
        a, b = rank["two-modules"]
        assert torch.equal(a, 1.5 * torch.full((2,), 1 + 2.0**-10))
        assert torch.equal(b, torch.full((2,), 1 + 2.0**-10))


def test_a_second_fit(ranks):
    exact, magnitudes = exact_mean()
    for given in ranks[0]["twice"]:
        assert relative_error(given, exact) <= float32_bound(exact, magnitudes, 2 * COUNT)
    assert len(ranks[0]["twice"]) == 2


def test_an_overflow_on_one_rank_within_no_sync_skips_the_step_of_both(ranks):
    for rank in ranks:
        assert rank["overflow"]["scale"] == 4.0
        # three micro-batches of (1, 1) on rank 0 and of (2, 1) on rank 1
        assert [given[0].tolist() for given in rank["overflow"]["given"]] == [[4.5, 3.0], [4.5, 3.0]]


@pytest.mark.parametrize("name", [*FORMS, "fp8"])
def test_masters_stay_bit_equal_between_ranks(ranks, name):
    first, second = (rank["weights"][name] for rank in ranks)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, ranks[0]["start"])


def test_errors(ranks):
    messages = ranks[0]["errors"]
    assert "call `fabric.backward(loss)` instead of `loss.backward()`" in messages["fabric"]
    assert "`grad_accumulation_dtype=torch.float32` under DDP adds gradients after every backward" in messages["behind"]
    assert "Use `sparse=False`, or `grad_reduce_dtype=None`." in messages["sparse"]
    assert "`grad_reduce_dtype=torch.float32` needs to see the DDP module, and did not" in messages["unseen"]


def test_a_comm_hook_of_the_users_own_is_not_overridden():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    def trainer(**options):
        strategy = DDPStrategy(ddp_comm_hook=bf16_compress_hook)
        plugin = HalfMixed("bf16", master_weights=True, **options)
        return L.Trainer(accelerator="cpu", strategy=strategy, plugins=plugin, logger=False)

    for options in ({"grad_reduce_dtype": torch.float32}, FLOAT32):
        with pytest.raises(ValueError, match=r"`ddp_comm_hook=bf16_compress_hook` does not go with.*Leave one of them"):
            trainer(**options)
    trainer()
