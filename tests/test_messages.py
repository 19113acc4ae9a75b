"""Log lines and warnings of this package: one logger, one class of warnings, on rank 0, and none of torchao's."""

import os
import subprocess
import sys

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_lowprec
from lightning_lowprec import messages

OF_TORCHAO = ("Failed to load", "KernelPreference")


def stderr_of(code: str, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("first", "times"),
    [
        ("import lightning_lowprec_autoload as ours", 1),
        ("import logging; logging.basicConfig(); import lightning_lowprec_autoload as ours", 1),
        ("import lightning_lowprec_autoload as ours, logging; ours.info('first'); logging.basicConfig()", 1),
        ("import lightning_lowprec_autoload as ours, logging; logging.getLogger(ours.LOGGER).setLevel('ERROR')", 0),
    ],
)
def test_a_line_is_said_once_whoever_has_set_up_logging(first, times):
    assert stderr_of(f"{first}; ours.info('a line')").count("a line") == times


def test_the_rank_is_that_of_lightning_at_the_moment_of_the_line(monkeypatch, caplog, caught):
    for rank in (1, 0, 3):
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        messages.info(f"of rank {rank}")
        messages.warn(f"of rank {rank}")
    said = ("of rank 0", lightning_lowprec.LowPrecisionWarning)  # which can be silenced alone
    assert [(str(w.message), w.category) for w in caught] == [said]
    assert issubclass(said[1], UserWarning)
    assert [record.getMessage() for record in caplog.records if record.name == "lightning_lowprec"] == ["of rank 0"]


def test_bytes_have_three_digits_and_the_unit_that_suits_them():
    words = {
        0: "0 bytes", 999: "999 bytes", 999.6: "1 kB", 25_449: "25.4 kB", 999_499: "999 kB", 999_500: "1 MB",
        3 * 2**20: "3.15 MB", 10**9: "1 GB", 2.5e12: "2.5 TB",
    }  # fmt: skip
    assert {count: messages.in_units(count) for count in words} == words


@pytest.mark.slow("0")
@pytest.mark.parametrize("switch", ["1", "0"])
def test_import_of_torchao_says_nothing_of_what_nobody_asked_for(switch):
    code = (
        "import torch, logging; logging.basicConfig(); import torchao.float8; logging.getLogger('torchao').error('own')"
    )
    said = stderr_of(code, LOWPREC_AUTOLOAD=switch)
    assert "own" in said
    assert any(line in said for line in OF_TORCHAO) == (switch == "0")
