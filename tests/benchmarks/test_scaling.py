"""Set-up and a step take as many calls per block for many blocks as for few."""

import pytest

from benchmarks import scaling

FEW, TIMES = 8, 4
SET_UP = 8000
"""The most calls that set-up may take per block; looking private names up again for every weight took 13 ms."""


@pytest.mark.parametrize("name", scaling.NAMES)
def test_set_up_and_step_are_linear_in_the_number_of_blocks(name):
    """Calls of Python and C functions; what does not depend on the blocks makes the ratio smaller."""
    scaling.costs(name, 2, scaling.calls)  # imports
    few, many = (scaling.costs(name, blocks, scaling.calls) for blocks in (FEW, TIMES * FEW))
    assert {part: calls for part, calls in many.items() if calls > TIMES * few[part]} == {}
    assert many["set-up"] <= SET_UP * TIMES * FEW


def test_an_exponent_is_that_of_the_two_largest_numbers():
    assert scaling.exponent({4: 1.0, 64: 32.0, 16: 2.0}) == pytest.approx(2)  # 4 ** 2 = 16 times as much


def test_the_command_prints_a_line_per_precision_and_cost(capsys):
    scaling.main(["--names", "bf16-sr", "--blocks", "1", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1:3] for line in lines[2:]] == [[" bf16-sr ", " milliseconds "], [" bf16-sr ", " calls "]]
