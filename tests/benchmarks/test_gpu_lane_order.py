"""Who is measured first, where, and for how long: GPU time goes to what decides."""

from benchmarks.gpu_lane.contenders import BASELINE, BF16_TRUE, BF16_WEIGHTS, MAIN, MAIN_TE
from benchmarks.gpu_lane.linear_runs import FEWER, NAMES, OF_STEPS
from benchmarks.gpu_lane.part_linear import Linears, columns, shapes
from benchmarks.gpu_lane.parts import PARTS
from benchmarks.gpu_lane.settings import Settings


def keys(part, settings):
    return [item.key for item in PARTS[part].items(settings)]


def test_the_first_comparison_settles_what_fp8_hybrid_means():
    listed = [item.key for item in PARTS["step8b"].items(Settings())]
    assert listed[:5] == [BASELINE, MAIN, MAIN_TE, BF16_TRUE, BF16_WEIGHTS]


def test_smoke_is_short_and_smoke_all_has_everyone():
    few, everyone = keys("smoke", Settings()), keys("smoke-all", Settings())
    assert few[:5] == ["support", "peaks", "linear bf16", "linear torchao tensorwise", "linear te delayed"]
    toys = [f"toy step: {name}" for name in (MAIN, MAIN_TE)]
    assert few[5:] == [*toys, f"toy step: {MAIN} (blocks compiled)"]
    assert set(few) < set(everyone)
    steps = [key for key in keys("step8b", Settings()) if "again" not in key and "whole model" not in key]
    assert {f"toy step: {key}" for key in steps} <= set(everyone)


def test_compilation_is_paid_for_the_shapes_of_the_steps():
    settings = Settings(batch=2)
    first, later = shapes(settings)[:4], shapes(settings)[-1]
    for shape in first:
        assert columns(shape, settings) == (*NAMES, *OF_STEPS)
    assert {shape[1:] for shape in first} == {(4096, 14336), (14336, 4096), (4096, 4096), (4096, 1024)}
    assert columns((8192, 2048, 8192), settings) == (*FEWER, *OF_STEPS), "of the 1B step"
    assert columns(later, settings) == FEWER
    assert set(NAMES) - set(FEWER) == {"torchao rowwise_with_gw_hp"}
    seconds = {item.key: item.seconds for item in Linears().items(settings)}
    assert seconds["8192x4096x14336"] == 35.0 > seconds["x".join(map(str, later))]


def test_twenty_steps_of_which_sixteen_are_timed():
    assert Settings().steps == 20
    assert {item.seconds for item in PARTS["step8b"].items(Settings())} == {35.0}
