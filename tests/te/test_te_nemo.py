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
    assert repr(plugin.masters) == repr(half.masters)
    assert (plugin.scaler is None) == (half.scaler is None) == (base == "bf16")
    if half.scaler is not None:
        assert plugin.scaler.config == half.scaler.config
