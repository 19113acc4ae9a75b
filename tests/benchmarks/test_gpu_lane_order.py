"""Who is measured first, where, and for how long: GPU time goes to what decides."""

from benchmarks.gpu_lane.__main__ import MINUTES
from benchmarks.gpu_lane.contenders import BASELINE, BF16_TRUE, BF16_WEIGHTS, MAIN, MAIN_TE
from benchmarks.gpu_lane.linear_runs import FEWER, NAMES, OF_STEPS
from benchmarks.gpu_lane.part_linear import Linears, columns, shapes
from benchmarks.gpu_lane.parts import PARTS
from benchmarks.gpu_lane.settings import Settings


def test_the_first_comparison_settles_what_fp8_hybrid_means():
    listed = [item.key for item in PARTS["step8b"].items(Settings())]
    assert listed[:5] == [BASELINE, MAIN, MAIN_TE, BF16_TRUE, BF16_WEIGHTS]


def test_compilation_is_paid_for_the_shapes_of_the_steps():
    settings = Settings(batch=2)
    first, later = shapes(settings)[:4], shapes(settings)[-1]
    for shape in first:
        assert columns(shape, settings) == (*NAMES, *OF_STEPS)
    assert {shape[1:] for shape in first} == {(4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024)}
    assert columns(later, settings) == FEWER
    assert set(NAMES) - set(FEWER) == {"torchao rowwise_with_gw_hp"}
    seconds = {item.key: item.seconds for item in Linears().items(settings)}
    assert seconds["8192x4096x14336"] == 35.0 > seconds["x".join(map(str, later))]


def test_twenty_steps_of_which_sixteen_are_timed():
    assert Settings().steps == 20
    assert {item.seconds for item in PARTS["step8b"].items(Settings())} == {35.0}


def test_the_parts_share_one_call_of_25_minutes():
    assert list(MINUTES) == list(PARTS)
    assert sum(MINUTES.values()) == 25.0
