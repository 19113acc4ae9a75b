"""The options of a plugin as fields of a DeepSpeed config; DeepSpeed itself is not needed."""

import pytest
import torch

import lightning_lowprec as lp
from lightning_lowprec.zero import SCALE_FIELDS, ZeroOptions, scale_fields, translated


def options_of(plugin):
    return ZeroOptions.of(plugin)


BF16 = options_of(lp.HalfMixed("bf16", master_weights=True))
FP16 = options_of(lp.HalfMixed("fp16", master_weights=True))


def test_bf16():
    assert translated({}, BF16, SCALE_FIELDS) == {"bf16": {"enabled": True}}


def test_fp16_with_the_default_scale_takes_what_the_strategy_was_given():
    given = {**SCALE_FIELDS, "loss_scale_window": 500}
    assert translated({}, FP16, given) == {"fp16": {"enabled": True, **given}}
    assert translated({"fp16": {"hysteresis": 7}}, FP16, given)["fp16"]["hysteresis"] == 7


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (lp.LossScale(initial=8.0, growth_interval=3, hysteresis=4, floor=2.0), (0, 3, 3, 4, 2)),
        (1024.0, (1024.0, None, None, None, None)),
    ],
    ids=["dynamic", "static"],
)
def test_loss_scales(scale, expected):
    section = translated({}, options_of(lp.HalfMixed("fp16", loss_scale=scale)), SCALE_FIELDS)["fp16"]
    assert tuple(section.get(field) for field in SCALE_FIELDS) == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("initial", 1000.0, "a power of two"),
        ("growth_factor", 4.0, "2.0"),
        ("backoff_factor", 0.25, "0.5"),
        ("floor", 1.5, "an integer from 1"),
        ("patience_at_floor", 7, "the default"),
    ],
)
def test_scales_that_deepspeed_does_not_have(field, value, expected):
    with pytest.raises(
        ValueError, match=rf"`LossScale\({field}=.*\)` is not possible under DeepSpeed.* expected {expected}"
    ):
        scale_fields(lp.LossScale(**{field: value}), "16-mixed")


def test_skipped_steps():
    plugin = lp.HalfMixed("bf16", skip_nonfinite=True)
    assert translated({}, options_of(plugin), SCALE_FIELDS)["bf16"] == {"enabled": True, "check_grad_overflow": True}
    with pytest.raises(ValueError, match=r"`bf16.check_grad_overflow=True`, and the DeepSpeed config has `.*=False`"):
        translated({"bf16": {"check_grad_overflow": False}}, options_of(plugin), SCALE_FIELDS)


def test_dtypes_of_gradients_and_buffers():
    plugin = lp.HalfMixed(
        "bf16",
        master_weights=True,
        grad_accumulation_dtype=torch.float32,
        buffer_dtype=torch.bfloat16,
    )
    assert translated({}, options_of(plugin), SCALE_FIELDS) == {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"},
    }
    with pytest.raises(ValueError, match=r"`.*grad_accum_dtype='fp32'`, and the DeepSpeed config has `.*='bf16'`"):
        translated({"data_types": {"grad_accum_dtype": "bf16"}}, options_of(plugin), SCALE_FIELDS)


@pytest.mark.parametrize(
    ("config", "means", "has"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled=False", "fp16.enabled=True"),
        ({"bf16": {"enabled": False}}, "bf16.enabled=True", "bf16.enabled=False"),
        ({"bfloat16": {"enabled": False}}, "bf16.enabled=True", "bf16.enabled=False"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=False", "torch_autocast.enabled=True"),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads=False",
            "bf16.bf16_master_weights_and_grads=True",
        ),
    ],
    ids=["fp16", "bf16", "bfloat16", "autocast", "masters"],
)
def test_contradictions_raise_with_both_values(config, means, has):
    with pytest.raises(ValueError, match=rf"means `{means}`, and the DeepSpeed config has `{has}`"):
        translated(config, BF16, SCALE_FIELDS)


def test_auto_and_equal_values_pass_and_the_given_config_stays():
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}
    assert translated(config, BF16, SCALE_FIELDS) == {"bf16": {"enabled": True}, "fp16": {"enabled": False}}
    assert config == {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False}}
