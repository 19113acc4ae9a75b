"""The options of a plugin as fields of a DeepSpeed config, and what no stage of ZeRO runs; without DeepSpeed."""

import lightning as L
import pytest
import torch

import lightning_lowprec as lp
from lightning_lowprec.zero import SCALE_FIELDS, ZeroOptions, scale_fields, translated

BF16 = ZeroOptions.of(lp.HalfMixed("bf16", master_weights=True))
FP16 = ZeroOptions.of(lp.HalfMixed("fp16", master_weights=True))
MASTERS = "bf16_master_weights_and_grads"


def test_fp16_with_the_default_scale_takes_what_the_strategy_was_given():
    given = {**SCALE_FIELDS, "loss_scale_window": 500}
    assert translated({}, FP16, given) == {"fp16": {"enabled": True, **given}}
    assert translated({"fp16": {"hysteresis": 7}}, FP16, given)["fp16"]["hysteresis"] == 7
    same, other = (
        ZeroOptions.of(lp.HalfMixed("fp16", loss_scale=lp.LossScale(growth_interval=steps))) for steps in (500, 100)
    )
    assert translated({}, same, given)["fp16"]["loss_scale_window"] == 500
    with pytest.raises(ValueError, match=r"`fp16.loss_scale_window=100`, and the strategy has `loss_scale_window=500`"):
        translated({}, other, given)


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (lp.LossScale(initial=8.0, growth_interval=3, hysteresis=4, floor=2.0), (0, 3, 3, 4, 2)),
        (lp.LossScale(initial=1.0, patience_at_floor=1), (0, 0, 2000, 1, 1)),
        (1024.0, (1024.0, None, None, None, None)),
    ],
    ids=["dynamic", "from one", "static"],
)
def test_loss_scales(scale, expected):
    section = translated({}, ZeroOptions.of(lp.HalfMixed("fp16", loss_scale=scale)), SCALE_FIELDS)["fp16"]
    assert tuple(section.get(field) for field in SCALE_FIELDS) == expected


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("initial", 1000.0, "a power of two"),
        ("growth_factor", 1.0, "2.0"),
        ("backoff_factor", 0.25, "0.5"),
        ("floor", 1.5, "an integer from 1"),
        ("patience_at_floor", 7, "the default"),
    ],
)
def test_scales_that_deepspeed_does_not_have(field, value, expected):
    said = rf"`LossScale\({field}=.*\)` is not possible under DeepSpeed.* expected {expected}"
    with pytest.raises(ValueError, match=said):
        scale_fields(lp.LossScale(**{field: value}), "16-mixed")


def test_skipped_steps():
    plugin = lp.HalfMixed("bf16", skip_nonfinite=True)
    section = translated({}, ZeroOptions.of(plugin), SCALE_FIELDS)["bf16"]
    assert section == {"enabled": True, "check_grad_overflow": True}
    with pytest.raises(ValueError, match=r"`bf16.check_grad_overflow=True`, and the DeepSpeed config has `.*=False`"):
        translated({"bf16": {"check_grad_overflow": False}}, ZeroOptions.of(plugin), SCALE_FIELDS)


def test_dtypes_of_gradients_and_buffers():
    dtypes = {"grad_accumulation_dtype": torch.float32, "buffer_dtype": torch.bfloat16}
    for base in ("bf16", "fp16"):
        plugin = lp.HalfMixed(base, master_weights=True, **dtypes)
        section = translated({}, ZeroOptions.of(plugin), SCALE_FIELDS)["data_types"]
        assert section == {"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"}
    with pytest.raises(ValueError, match=r"`.*grad_accum_dtype='fp32'`, and the DeepSpeed config has `.*='bf16'`"):
        translated({"data_types": {"grad_accum_dtype": "bf16"}}, ZeroOptions.of(plugin), SCALE_FIELDS)


@pytest.mark.parametrize(
    ("config", "means", "has"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled=False", "fp16.enabled=True"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bf16.enabled=True", "bf16.enabled=False"),
        ({"bfloat16": {"enabled": False}}, "bf16.enabled=True", "bf16.enabled=False"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=False", "torch_autocast.enabled=True"),
        ({"bf16": {MASTERS: True}}, f"bf16.{MASTERS}=False", f"bf16.{MASTERS}=True"),
    ],
    ids=["fp16", "bf16", "bfloat16", "autocast", "masters"],
)
def test_contradictions_raise_with_both_values(config, means, has):
    with pytest.raises(ValueError, match=rf"means `{means}`, and the DeepSpeed config has `{has}`"):
        translated(config, BF16, SCALE_FIELDS)


def test_auto_and_equal_values_pass_and_the_given_config_stays():
    assert translated({}, BF16, SCALE_FIELDS) == {"bf16": {"enabled": True}}
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "torch_autocast": {"enabled": False}}
    expected = {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "torch_autocast": {"enabled": False}}
    assert translated(config, BF16, SCALE_FIELDS) == translated(expected, BF16, SCALE_FIELDS) == expected
    assert config["bf16"] == config["fp16"] == {"enabled": "auto"}


# ---- refused by the name of the strategy, before DeepSpeed is imported


@pytest.mark.parametrize("make", [L.Fabric, L.Trainer])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"precision": "bf16-remainder"}, r"has no `form='remainder'`\. Use `precision='bf16-master'`"),
        ({"precision": "fp8-hybrid-8bit"}, r"has no `form='remainder'`\. Use `precision='fp8-hybrid'`"),
        ({"precision": "bf16-sr"}, r"has no `form='stochastic'`\. Use `precision='bf16-master'`"),
        ({"plugins": "8bit"}, r"has no `moments='8bit'`\. Use `precision='bf16-master'`"),
        ({"plugins": "keep"}, r"`weights='keep'` trains .* ZeRO always has float32 masters\. Leave `weights` out"),
        ({"plugins": "chunked"}, r"`head='chunked'` reads the weight of the output head .* Leave `head` out"),
        ({"plugins": "fp8"}, r"`head='fp8'` reads the weight of the output head .* Leave `head` out"),
    ],
    ids=["remainder", "fp8", "sr", "8bit", "keep", "head", "fp8 head"],
)
def test_refused_with_reason_and_way_out(make, how, reason):
    plugins = {
        "8bit": lambda: lp.HalfMixed("bf16", master_weights=lp.MasterConfig(moments="8bit")),
        "keep": lambda: lp.HalfMixed("bf16", weights="keep"),
        **{head: lambda head=head: lp.FP8TorchAO(head=head) for head in ("chunked", "fp8")},
    }
    how = {"plugins": plugins[how["plugins"]]()} if "plugins" in how else how
    with pytest.raises(ValueError, match=rf"does not run under `strategy='deepspeed_stage_2'`: .*{reason}"):
        make(strategy="deepspeed_stage_2", accelerator="cpu", devices=1, **how)


def test_msamp():
    with pytest.raises(
        ValueError, match=r"strategy='deepspeed_stage_3'` yet\. It runs under one .*, 'fsdp2', .* becomes 'fsdp2'\.$"
    ):
        L.Fabric(strategy="DeepSpeed_stage_3", accelerator="cpu", devices=1, precision="msamp-o3")
