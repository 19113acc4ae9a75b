"""NeMo's recipes: every knob of MegatronMixedPrecision, its value there, and where it is in our plugin."""

import pickle

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP, FP8TorchAO, FSDP2Strategy, HalfMixed, LossScale, recipes

NO_FP8 = {  # defaults of MegatronMixedPrecision that the half recipes leave alone
    "fp8": None, "fp8_recipe": "delayed", "first_last_layers_bf16": False, "fp8_margin": 0, "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent", "fp8_wgrad": True, "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False, "fp8_params": None, "fp8_param_gather": None,
    "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
}  # fmt: skip
LOSS_SCALE = {
    "fp16_loss_scale": None, "fp16_initial_loss_scale": 4294967296, "fp16_min_loss_scale": 1.0,
    "fp16_loss_scale_window": 1000, "fp16_hysteresis": 2,
}  # fmt: skip
NEMO = {
    "bf16_mixed": {
        "precision": "bf16-mixed", "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16,
        "autocast_dtype": None, "autocast_enabled": False, "grad_reduce_in_fp32": True, **NO_FP8, **LOSS_SCALE,
    },
    "fp16_mixed": {
        "precision": "16-mixed", "params_dtype": torch.half, "pipeline_dtype": torch.half,
        "autocast_dtype": None, "autocast_enabled": False, "grad_reduce_in_fp32": False, **NO_FP8, **LOSS_SCALE,
    },
}  # fmt: skip
NAMES = {"bf16-mixed": "bf16-master", "16-mixed": "fp16-master"}


def is_dynamic(config):
    return config.growth_factor == 2.0 and config.backoff_factor == 0.5


OURS = {
    "precision": lambda plugin, value: plugin.precision == NAMES[value],
    "params_dtype": lambda plugin, value: weight_after(plugin).dtype is value,
    # Megatron's buffer of gradients has one dtype, which it accumulates and reduces in
    "grad_reduce_in_fp32": lambda plugin, value: plugin.masters.accumulation is (torch.float32 if value else None),
    "fp8": lambda plugin, value: value is None and type(plugin) is HalfMixed,
    # without fp16 there is nothing to scale, there and here
    "fp16_loss_scale": lambda plugin, value: (
        plugin.scaler is None or (value is None and is_dynamic(plugin.scaler.config))
    ),
    "fp16_initial_loss_scale": lambda plugin, value: plugin.scaler is None or plugin.scaler.scale == value,
    "fp16_min_loss_scale": lambda plugin, value: plugin.scaler is None or plugin.scaler.config.floor == value,
    "fp16_loss_scale_window": lambda plugin, value: (
        plugin.scaler is None or plugin.scaler.config.growth_interval == value
    ),
    "fp16_hysteresis": lambda plugin, value: plugin.scaler is None or plugin.scaler.config.hysteresis == value,
}
NO_EQUAL = {
    "pipeline_dtype": "no pipeline parallelism",
    "autocast_dtype": "unused in NeMo while autocast is disabled",
    "autocast_enabled": "autocast is how softmax, norms and losses stay in float32 in models that are not Megatron's",
    **{knob: "nothing to set while `fp8` is None" for knob in NO_FP8 if knob != "fp8"},
}


def weight_after(plugin):
    layer = nn.Linear(2, 2)
    L.Fabric(accelerator="cpu", devices=1, plugins=plugin).setup(layer)
    return layer.weight


@pytest.mark.parametrize("name", NEMO)
def test_every_knob(name):
    knobs = NEMO[name]
    assert sorted(knobs) == sorted([*OURS, *NO_EQUAL])
    for knob, holds in OURS.items():
        assert holds(getattr(recipes, name)(), knobs[knob]), knob
    assert getattr(recipes, name)().masters.config.form == "fp32"
    assert (getattr(recipes, name)().scaler is None) is (name == "bf16_mixed")


def test_bf16_gradients_are_float32():
    layer = nn.Linear(2, 2)
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=recipes.bf16_mixed())
    module = fabric.setup(layer)
    fabric.backward(module(torch.ones(1, 2)).sum())
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


def test_recipes_take_nemos_arguments_and_the_plugins_options():
    plugin = recipes.fp16_mixed(
        fp16_initial_loss_scale=2.0**16, fp16_min_loss_scale=2.0, fp16_loss_scale_window=50, fp16_hysteresis=1
    )
    assert plugin.scaler.config == LossScale(initial=2.0**16, floor=2.0, growth_interval=50, hysteresis=1)
    assert recipes.fp16_mixed(fp16_loss_scale=128.0).scaler.config == LossScale.of(128.0)
    halves = recipes.bf16_mixed(grad_reduce_in_fp32=False, buffer_dtype=torch.bfloat16)
    assert halves.masters.accumulation is None
    assert halves.masters.buffer_dtype is torch.bfloat16
    same = {"precision": "bf16-mixed", "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    found, expected = recipes.bf16_mixed(**same, autocast_enabled=True).masters, recipes.bf16_mixed().masters
    for field in ("config", "buffer_dtype", "accumulation"):
        assert getattr(found, field) == getattr(expected, field)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"autocast_enabled": False},
            "`autocast_enabled=False` is not possible .* True. Leave it out: autocast is always on",
        ),
        ({"params_dtype": torch.float16}, "`params_dtype=torch.float16` is not possible in this recipe"),
        ({"pipeline_dtype": torch.float32}, "There is no pipeline parallelism here"),
        ({"precision": "16-mixed"}, "`precision='16-mixed'` is not possible"),
        ({"fp8_margin": 2}, "`fp8_margin=2` goes with the FP8 recipes, such as `bf16_with_fp8_mixed`"),
        ({"grad_reduce_in_fp32": "yes"}, "`grad_reduce_in_fp32='yes'` is not valid; expected True or False"),
    ],
)
def test_arguments_without_an_equal_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        recipes.bf16_mixed(**arguments)


@pytest.mark.parametrize("knob", sorted({knob for knobs in NEMO.values() for knob in knobs} - {"precision"}))
@pytest.mark.parametrize("make", [recipes.bf16_mixed, FP8TorchAO, lambda: MSAMP("O2")])
def test_nemos_attributes_raise_when_they_are_set(make, knob):
    """NeMo users write `recipe.trainer.plugins.fp8_margin = 2`."""
    plugin = make()
    with pytest.raises(AttributeError, match=knob):
        setattr(plugin, knob, 2)
    if knob != "autocast_dtype":
        assert not hasattr(plugin, knob)
        with pytest.raises(AttributeError, match=rf"`{knob}=2` cannot be set on a .*would do nothing here\. \w+"):
            setattr(plugin, knob, 2)
    assert pickle.loads(pickle.dumps(plugin)).precision == plugin.precision


@pytest.mark.parametrize(
    ("recipe", "arguments", "dtype"),
    [
        ("bf16_mixed", {}, torch.float32),
        ("bf16_mixed", {"grad_reduce_in_fp32": False}, torch.bfloat16),
        ("fp16_mixed", {}, torch.float16),
        ("fp16_mixed", {"grad_reduce_in_fp32": True}, torch.float32),
    ],
)
def test_fsdp2_reduces_in_the_dtype_in_which_nemo_does(recipe, arguments, dtype):
    """A recipe reduces in float32 if NeMo says so, else in the dtype of the weights."""
    plugin = getattr(recipes, recipe)(**arguments)
    sharding = FSDP2Strategy().sharding
    sharding.meet(plugin, torch.device("cpu"))
    assert sharding.options.reduce_dtype is dtype
    own = FSDP2Strategy(reduce_dtype=torch.float64).sharding
    own.meet(getattr(recipes, recipe)(**arguments), torch.device("cpu"))
    assert own.options.reduce_dtype is torch.float64, "the user's word is the last"


def test_ddp_runs_without_float32_gradients_only():
    with pytest.raises(ValueError, match=r"does not run under `strategy='DDPStrategy'`.*`grad_reduce_in_fp32=False`"):
        L.Fabric(accelerator="cpu", devices=2, plugins=recipes.bf16_mixed())
    L.Fabric(accelerator="cpu", devices=2, plugins=recipes.bf16_mixed(grad_reduce_in_fp32=False))


def test_an_object_of_accelerate_is_refused_with_the_plugin_to_write():
    accelerate = pytest.importorskip("accelerate.utils")
    for make in (L.Trainer, L.Fabric):
        with pytest.raises(TypeError, match=r"`plugins=AORecipeKwargs\(...\)` is .*Write `FP8TorchAO\(recipe="):
            make(plugins=accelerate.AORecipeKwargs(), accelerator="cpu")
