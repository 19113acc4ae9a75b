"""Recipes from plain values, against Transformer Engine's own classes."""

import pytest
from transformer_engine.common import recipe as te

from lightning_lowprec import FP8TE


def make(recipe, **options):
    if isinstance(recipe, str):
        recipe, options = {"recipe": recipe, **options}, {}
    return FP8TE(recipe, **options).recipe


@pytest.mark.parametrize(
    ("kind", "cls"),
    [
        ("delayed", te.DelayedScaling),
        ("current", te.Float8CurrentScaling),
        ("block", te.Float8BlockScaling),
        ("mxfp8", te.MXFP8BlockScaling),
        ("nvfp4", te.NVFP4BlockScaling),
    ],
)
def test_kinds(kind, cls):
    made = make(kind)
    assert type(made) is cls
    assert repr(made) == repr(cls())  # its defaults
    assert FP8TE(kind).kind == kind


def test_fields_reach_the_recipe():
    made = make("delayed", fp8_format="e4m3", margin=2, amax_history_len=16, amax_compute_algo="most_recent")
    assert (made.fp8_format, made.margin, made.amax_history_len) == (te.Format.E4M3, 2, 16)
    assert made.amax_compute_algo == "most_recent"
    assert make("delayed", reduce_amax=False).reduce_amax is False
    assert make("delayed", fp8_dpa=True, fp8_mha=True).fp8_mha is True
    assert make("nvfp4", disable_rht=True).disable_rht is True
    assert make("block", fp8_format="hybrid").fp8_format is te.Format.HYBRID


def test_mapping_and_object():
    assert make({"recipe": "current", "fp8_format": "E4M3"}).fp8_format is te.Format.E4M3
    assert make({"amax_history_len": 3}).amax_history_len == 3  # delayed
    own = te.DelayedScaling(amax_history_len=7)
    assert make(own) is own
    assert make(te.Float8CurrentScaling(), margin=None).fp8_format is te.Format.HYBRID


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("delayd", {}, "expected one of: 'delayed'"),
        ("delayed", {"amax_history_length": 3}, "which has: amax_compute_algo, amax_history_len"),
        ("current", {"margin": 1}, "it goes with delayed, mxfp8"),
        ("delayed", {"disable_rht": True}, "it goes with nvfp4"),
        ("delayed", {"fp8_format": "e5m2"}, "do not train"),
        ("delayed", {"amax_compute_algo": "mean"}, "amax_compute_algo"),
        ("delayed", {"amax_history_len": 0}, "`amax_history_len=0` is not valid; expected an integer of at least 1"),
        (te.DelayedScaling(amax_history_len=0), {}, "`amax_history_len=0` is not valid; expected an integer of at"),
        ("delayed", {"backward_override": "high_precision"}, "Delayed scaling only supports"),
        ("block", {"fp8_dpa": True}, "FP8 attention is not supported"),
        ("nvfp4", {"fp8_format": "hybrid"}, "Only E4M3"),
        ({"margin": 1}, {"margin": 2}, "given both"),
        (te.DelayedScaling(), {"margin": 2}, "set it in the object"),
    ],
)
def test_what_a_recipe_does_not_have_raises(recipe, options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        make(recipe, **options)


@pytest.mark.parametrize(
    ("recipe", "powers_of_two"),
    [
        ("current", False),
        ({"recipe": "current", "use_power_2_scales": True}, True),
        ("block", True),
        ({"recipe": "block", "use_f32_scales": True}, False),
    ],
)
def test_flags_of_scales_count(recipe, powers_of_two):
    made = make(recipe)
    for of_what in (made.fp8_quant_fwd_inp, made.fp8_quant_fwd_weight, made.fp8_quant_bwd_grad):
        assert of_what.power_2_scale is powers_of_two
    assert make("current").fp8_quant_fwd_weight.power_2_scale is False  # the classes stay as they are
