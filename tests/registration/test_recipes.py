"""NeMo's recipes: values of MegatronMixedPrecision in our plugin, and what is refused."""

import pickle
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, FSDP2Strategy, HalfMixed, LossScale, recipes

KNOBS = (
    "params_dtype", "pipeline_dtype", "autocast_dtype", "autocast_enabled", "grad_reduce_in_fp32", "fp8", "fp8_recipe",
    "first_last_layers_bf16", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad",
    "fp8_dot_product_attention", "fp8_multi_head_attention", "fp8_params", "fp8_param_gather",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp16_loss_scale", "fp16_initial_loss_scale",
    "fp16_min_loss_scale", "fp16_loss_scale_window", "fp16_hysteresis",
)  # fmt: skip
"""Of MegatronMixedPrecision, beside `precision`."""
UNDER_DDP = r"does not run under `strategy='DDPStrategy'`.*`grad_reduce_in_fp32=False`"


def test_the_values_are_those_of_megatron():
    bf16, fp16 = recipes.bf16_mixed(), recipes.fp16_mixed()
    for plugin, name, dtype, accumulation in (
        (bf16, "bf16-master", torch.bfloat16, torch.float32), (fp16, "fp16-master", torch.half, None)
    ):  # fmt: skip
        assert (type(plugin), plugin.precision, plugin.masters.config.form) == (HalfMixed, name, "fp32")
        L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup(layer := nn.Linear(2, 2))
        assert layer.weight.dtype is dtype
        assert plugin.masters.accumulation is accumulation
    assert bf16.scaler is None
    assert recipes.fp16_mixed().scaler.config == LossScale(
        initial=2.0**32, floor=1.0, growth_interval=1000, hysteresis=2, growth_factor=2.0, backoff_factor=0.5
    )


def test_recipes_take_nemos_arguments_and_the_plugins_options():
    plugin = recipes.fp16_mixed(
        fp16_initial_loss_scale=2.0**16, fp16_min_loss_scale=2.0, fp16_loss_scale_window=50, fp16_hysteresis=1
    )
    assert plugin.scaler.config == LossScale(initial=2.0**16, floor=2.0, growth_interval=50, hysteresis=1)
    of_one = {"fp16_loss_scale": 128.0, "fp16_hysteresis": 1, "precision": "16", "fp8": None}
    assert recipes.fp16_mixed(**of_one).scaler.config == LossScale.of(128.0), "a constant wins, as in NeMo"
    for wrong, said in (
        ({"fp8": "hybrid"}, "`fp8='hybrid'` goes with the FP8 recipes, such as `bf16_with_fp8_mixed`"),
        ({"fp8_wgrad": False}, r"`fp8_wgrad=False` is not possible in this recipe; expected True\. For weight grad"),
    ):
        with pytest.raises(ValueError, match=said):
            recipes.bf16_mixed(**wrong)
    halves = recipes.bf16_mixed(grad_reduce_in_fp32=False, buffer_dtype=torch.bfloat16)
    assert halves.masters.accumulation is None
    assert halves.masters.buffer_dtype is torch.bfloat16
    same = {"precision": "bf16-mixed", "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    found, expected = recipes.bf16_mixed(**same, autocast_enabled=True).masters, recipes.bf16_mixed().masters
    for field in ("config", "buffer_dtype", "accumulation"):
        assert getattr(found, field) == getattr(expected, field)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("make", [recipes.bf16_mixed, FP8TorchAO, lambda: MSAMP("O2")])
def test_nemos_attributes_raise_when_they_are_set(make, knob):
    plugin, own = make(), knob == "autocast_dtype"
    assert hasattr(plugin, knob) == own
    said = knob if own else rf"`{knob}=2` cannot be set on a .*would do nothing here\. \w+"
    with pytest.raises(AttributeError, match=said):
        setattr(plugin, knob, 2)
    assert pickle.loads(pickle.dumps(plugin)).precision == plugin.precision


@pytest.mark.parametrize(
    ("recipe", "arguments", "dtype"),
    [
        ("bf16_mixed", {}, torch.float32),
        ("bf16_mixed", {"grad_reduce_in_fp32": False}, torch.bfloat16),
        ("fp16_mixed", {"grad_reduce_in_fp32": True}, torch.float32),
        ("fp16_mixed", {}, torch.float16),
    ],
)
def test_fsdp2_reduces_in_the_dtype_in_which_nemo_does(recipe, arguments, dtype):
    plugin = getattr(recipes, recipe)(**arguments)
    with nullcontext() if plugin.masters.accumulation is None else pytest.raises(ValueError, match=UNDER_DDP):
        L.Fabric(accelerator="cpu", devices=2, plugins=plugin)
    for asked in (None, torch.float64):
        sharding = FSDP2Strategy(reduce_dtype=asked).sharding
        sharding.meet(plugin, torch.device("cpu"))
        assert sharding.options.reduce_dtype is (asked or dtype)


def test_an_object_of_accelerate_is_refused_with_the_plugin_to_write():
    accelerate = pytest.importorskip("accelerate.utils")
    for make in (L.Trainer, L.Fabric):
        with pytest.raises(TypeError, match=r"`plugins=AORecipeKwargs\(...\)` is .*Write `FP8TorchAO\(recipe="):
            make(plugins=[FP8TorchAO(), accelerate.AORecipeKwargs()], accelerator="cpu")
