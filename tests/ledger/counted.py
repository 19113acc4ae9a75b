"""Entries of the ledger, each counted once per process."""

import functools
from functools import partial

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.ledger.entry import Entry
from benchmarks.ledger.step import measure
from benchmarks.rivals import contenders, models, setups
from benchmarks.rivals.running import Job, Running
from lightning_lowprec import FP8TE, FP8TorchAO

STACK = models.SHAPES["8b"]


def _ours_as_by_hand(recipe: str, job: Job) -> Running:
    return setups.lightning(job, plugin=FP8TE(recipe), compiled=False)


def _per_gemm(job: Job) -> Running:
    return setups.lightning(job, plugin=FP8TorchAO(weight_codes="per_gemm"), compiled=False)


OWN = {"ours fp8-hybrid, codes per GEMM": _per_gemm} | {
    f"ours {recipe}, as by hand": partial(_ours_as_by_hand, recipe) for recipe in ("delayed", "current", "block")
}


@functools.cache
def entry(contender: str) -> Entry:
    setup = OWN.get(contender) or contenders.find(contender).setup
    return measure(contender, setup, STACK)


def fake_world(ranks: int) -> None:
    """Be rank 0 of a process group that sends nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
