"""NeMo's FP8 recipes: the knobs that ``nemo.collections.llm.recipes.precision.mixed_precision`` sets, and ours."""

import pytest
import torch
from transformer_engine.common import recipe as te

from lightning_lowprec import FP8TE, recipes

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
    assert type(plugin) is FP8TE
    assert type(plugin.recipe) is cls
    assert plugin.recipe.fp8_format is te.Format.HYBRID
    assert {field: getattr(plugin.recipe, field) for field in fields} == fields
    assert plugin.fp8_params == (cls in (te.DelayedScaling, te.Float8CurrentScaling))
    layers = plugin.layers
    assert layers.first_last_layers_bf16 == bool(blocks)
    assert (layers.num_layers_at_start_in_bf16, layers.num_layers_at_end_in_bf16) == (1, 1)
    half = {"bf16": recipes.bf16_mixed, "fp16": recipes.fp16_mixed}[base]()
    assert plugin.autocast_dtype is half.autocast_dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[base]
    assert type(plugin.masters) is type(half.masters)
    for field in ("config", "buffer_dtype", "accumulation"):
        assert getattr(plugin.masters, field) == getattr(half.masters, field)
    assert (plugin.scaler is None) == (half.scaler is None) == (base == "bf16")
    if half.scaler is not None:
        assert plugin.scaler.config == half.scaler.config


def test_the_arguments_of_nemo():
    plugin = recipes.bf16_with_fp8_mixed(
        fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="most_recent", fp8="e4m3", keep=["lm_head"]
    )
    recipe = plugin.recipe
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (2, 16, "most_recent")
    assert recipe.fp8_format is te.Format.E4M3
    assert plugin.layers.keep == ["lm_head"]
    assert recipes.bf16_with_fp8_mixed(fp8_params=False, fp8_param_gather=False).fp8_params is False
    blocks = recipes.bf16_with_fp8_current_scaling_mixed(fp8_recipe="tensorwise", num_layers_at_end_in_bf16=2).layers
    assert (blocks.num_layers_at_start_in_bf16, blocks.num_layers_at_end_in_bf16) == (1, 2)
    attention = recipes.fp16_with_fp8_mixed(fp8_dot_product_attention=True, fp8_multi_head_attention=True).recipe
    assert attention.fp8_dpa
    assert attention.fp8_mha


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"fp8_wgrad": False},
            r"`fp8_wgrad=False` is not possible in this recipe; .* For weight gradients",
        ),
        ({"fp8_recipe": "mxfp8"}, "`fp8_recipe='mxfp8'` is not that of this recipe, which has 'delayed'"),
        ({"fp8_amax_history_len": 0}, "`amax_history_len=0` is not valid; expected None or an integer of at least 1"),
        ({"fp8_params": True, "fp8_param_gather": False}, "are one option here"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        recipes.bf16_with_fp8_mixed(**arguments)
