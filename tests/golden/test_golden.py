"""Every precision trains exactly as it did when ``golden.json`` was written.

Goldens guard, they prove nothing. A change of numerics edits the file: ``python -m tests.golden``. On a CPU that sums
products in another order, losses are compared within 2 % of the first loss.
"""

import json

import pytest

from tests.fsdp2 import ranks
from tests.golden import goldens, runs
from tests.representatives import names_on_cpu

GOLDEN = json.loads(goldens.FILE.read_text())
HERE = runs.arithmetic()


def check(run: str, found: dict) -> None:
    expected = GOLDEN["runs"][run].copy()
    if expected.pop("arithmetic", GOLDEN["arithmetic"]) == HERE:
        assert found == expected, f"{run} does not train as before. If it should not: `python -m tests.golden`."
        return
    first, *_ = expected["losses"]
    off = [abs(float.fromhex(a) - float.fromhex(b)) for a, b in zip(found["losses"], expected["losses"], strict=True)]
    assert max(off) < 0.02 * float.fromhex(first), f"{run}: losses differ by up to {max(off)}"


@pytest.mark.slow_but(
    "half-auto",
    "fp16-master",
    "bf16-remainder",
    "bf16-8bit",
    "bf16-sr",
    "fp8-hybrid",
    "fp8-hybrid-fp16",
    "fp8-hybrid-remainder",
    "fp8-block",
    "mxfp8",
    "fp8-rowwise",
    "fp8-rowwise-gw-hp-8bit",
    "int8-mixed",
    "msamp-o2",
)
@pytest.mark.parametrize("name", names_on_cpu())
def test_one_process(name):
    check(name, runs.train(0, name))


@pytest.mark.slow_but("fp8-hybrid-ddp", "fp8-hybrid-remainder-fsdp2")
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "strategy"), goldens.TWO_RANKS)
def test_two_ranks(name, strategy, tmp_path):
    for rank, (run,) in enumerate(ranks.run(runs.worlds, 2, tmp_path, [(name, strategy)])):
        check(f"{name}, {strategy}, rank {rank}", run)


def test_every_run_has_a_golden():
    on_ranks = [f"{name}, {strategy}, rank {rank}" for name, strategy in goldens.TWO_RANKS for rank in (0, 1)]
    assert GOLDEN["runs"].keys() == {*names_on_cpu(), *on_ranks}
