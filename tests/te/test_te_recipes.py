"""Recipes from plain values, against Transformer Engine's own classes."""

import pytest
import torch
from transformer_engine.common import recipe as te

from lightning_lowprec import FP8TE, fp8_state, recipes
from tests.te.reference import Net, fabric_for


def make(recipe, **options):
    if isinstance(recipe, str):
        recipe, options = {"recipe": recipe, **options}, {}
    return FP8TE(recipe, **options).recipe


CLASSES = {"delayed": "Delayed", "current": "Float8Current", "block": "Float8Block", "mxfp8": "MXFP8Block"}


@pytest.mark.parametrize(("kind", "name"), [*CLASSES.items(), ("nvfp4", "NVFP4Block")])
def test_kinds(kind, name):
    made, cls = make(kind), getattr(te, f"{name}Scaling")
    assert type(made) is cls
    assert repr(made) == repr(cls())  # its defaults
    assert FP8TE(kind).kind == kind


def test_fields_mappings_and_objects_reach_the_recipe():
    made = make("delayed", fp8_format="e4m3", margin=2, amax_history_len=16, amax_compute_algo="most_recent")
    assert (made.fp8_format, made.margin, made.amax_history_len) == (te.Format.E4M3, 2, 16)
    assert made.amax_compute_algo == "most_recent"
    assert make("delayed", reduce_amax=False).reduce_amax is False
    assert [getattr(FP8TE(fp8_mha=True).recipe, name) for name in ("fp8_dpa", "fp8_mha")] == [False, True]
    assert make("nvfp4", disable_rht=True).disable_rht is True
    assert make("block", fp8_format="hybrid").fp8_format is te.Format.HYBRID
    assert make({"recipe": "current", "fp8_format": te.Format.E4M3, "margin": None}).fp8_format is te.Format.E4M3
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
        ({"fp8_format": "e4m2"}, {}, r"expected one of: hybrid, e4m3\.$"),
        ({"*.up": "current"}, {}, "has left the package"),
        ({"*.up": {"recipe": "block"}}, {}, "has left the package"),
        (te.CustomRecipe(qfactory=print), {}, "has left the package"),
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
def test_flags_of_scales_count(recipe, powers_of_two, pretend_gpu):
    made = make(recipe)
    fabric_for(FP8TE(made)).setup(model := Net())
    fractions = {bool(value.log2().frac().any()) for key, value in fp8_state(model) if "scale" in key}
    assert fractions == {not powers_of_two}
    for of_what in (made.fp8_quant_fwd_inp, made.fp8_quant_fwd_weight, made.fp8_quant_bwd_grad):
        assert of_what.power_2_scale is powers_of_two
    assert make("current").fp8_quant_fwd_weight.power_2_scale is False  # the classes stay as they are


# ---- NeMo's recipes: the knobs of its mixed_precision, and ours


DELAYED = {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}
FP8 = {
    "fp8_mixed": (te.DelayedScaling, DELAYED, 0),
    "mxfp8_mixed": (te.MXFP8BlockScaling, {}, 0),
    "fp8_current_scaling_mixed": (te.Float8CurrentScaling, {}, 1),
    "fp8_subchannel_scaling_mixed": (te.Float8BlockScaling, {}, 0),
}


@pytest.mark.parametrize("base", ["bf16", "fp16"])
@pytest.mark.parametrize("name", FP8)
def test_recipe(base, name):
    plugin = getattr(recipes, f"{base}_with_{name}")()
    cls, fields, blocks = FP8[name]
    assert (type(plugin), type(plugin.recipe), plugin.recipe.fp8_format) == (FP8TE, cls, te.Format.HYBRID)
    assert {field: getattr(plugin.recipe, field) for field in fields} == fields
    assert plugin.fp8_params == (cls in (te.DelayedScaling, te.Float8CurrentScaling))
    layers = plugin.layers
    assert layers.first_last_layers_bf16 == bool(blocks)
    assert (layers.num_layers_at_start_in_bf16, layers.num_layers_at_end_in_bf16) == (1, 1)
    half = {"bf16": recipes.bf16_mixed, "fp16": recipes.fp16_mixed}[base]()
    assert plugin.autocast_dtype is half.autocast_dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[base]
    assert (type(plugin.masters), plugin.reduce_dtype) == (type(half.masters), half.reduce_dtype)
    for field in ("config", "buffer_dtype", "accumulation"):
        assert getattr(plugin.masters, field) == getattr(half.masters, field)
    assert (plugin.scaler is None) == (half.scaler is None) == (base == "bf16")
    assert getattr(plugin.scaler, "config", None) == getattr(half.scaler, "config", None)


def test_the_arguments_of_nemo():
    plugin = recipes.bf16_with_fp8_mixed(
        fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="most_recent", fp8="e4m3", keep=["lm_head"]
    )
    recipe = plugin.recipe
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (2, 16, "most_recent")
    assert (recipe.fp8_format, plugin.layers.keep) == (te.Format.E4M3, ["lm_head"])
    assert recipes.bf16_with_fp8_mixed(fp8_params=False, fp8_param_gather=False).fp8_params is False
    blocks = recipes.bf16_with_fp8_current_scaling_mixed(fp8_recipe="tensorwise", num_layers_at_end_in_bf16=2).layers
    assert (blocks.num_layers_at_start_in_bf16, blocks.num_layers_at_end_in_bf16) == (1, 2)
    attention = recipes.fp16_with_fp8_mixed(fp8_dot_product_attention=True, fp8_multi_head_attention=True).recipe
    assert (attention.fp8_dpa, attention.fp8_mha) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fp8_wgrad": False}, r"`fp8_wgrad=False` is not possible in this recipe; .* For weight gradients"),
        ({"fp8_recipe": "mxfp8"}, "`fp8_recipe='mxfp8'` is not that of this recipe, which has 'delayed'"),
        ({"fp8_recipe": "custom"}, "`fp8_recipe='custom'` is not that of this recipe, which has 'delayed'"),
        ({"fp8_amax_history_len": 0}, "`amax_history_len=0` is not valid; expected None or an integer of at least 1"),
        ({"fp8_params": True, "fp8_param_gather": False}, "are one option here"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        recipes.bf16_with_fp8_mixed(**arguments)
