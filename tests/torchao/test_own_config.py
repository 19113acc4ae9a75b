"""`FP8TorchAO(config=Float8LinearConfig(...))`: torchao's own configuration, in our layers."""

import lightning as L
import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity, ScalingType, e4m3_dtype

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.fsdp2.options import ShardOptions


def high():
    return CastConfig(scaling_type=ScalingType.DISABLED)  # a fresh one: torchao writes the dtype into it


def per_row():
    return CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=e4m3_dtype)


CONFIGS = {
    "default": (lambda: Float8LinearConfig(), "tensorwise", True),
    "power of two": (lambda: Float8LinearConfig(round_scales_to_power_of_2=True), "tensorwise", True),
    "all-gather": (
        lambda: Float8LinearConfig(enable_fsdp_float8_all_gather=True, pad_inner_dim=True),
        "tensorwise",
        True,
    ),
    "gw in high precision": (
        lambda: Float8LinearConfig(
            cast_config_input_for_grad_weight=high(), cast_config_grad_output_for_grad_weight=high()
        ),
        "tensorwise",
        True,
    ),
    "grad_input in high precision": (
        lambda: Float8LinearConfig(cast_config_weight_for_grad_input=high(), cast_config_grad_output=high(),
            cast_config_grad_output_for_grad_weight=CastConfig()),
        "tensorwise",
        False,
    ),
    "rowwise": (
        lambda: Float8LinearConfig(
            cast_config_input=per_row(), cast_config_weight=per_row(), cast_config_grad_output=per_row()
        ),
        "rowwise",
        False,
    ),
    "from a name": (lambda: Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), "rowwise_with_gw_hp", False),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_every_gemm_is_torchaos(name):
    """Output and gradients are bit for bit those of torchao's own conversion of the same model by the same config."""
    make, recipe, gathered = CONFIGS[name]
    masters = name == "grad_input in high precision"  # needs weights in the dtype of autocast
    plugin = FP8TorchAO(config=make(), master_weights=masters)
    assert plugin.precision == "fp8-torchao-config"
    assert plugin.recipe == recipe
    assert (plugin.gathers(ShardOptions()) is None) is gathered
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    theirs = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    theirs.load_state_dict(ours.state_dict())
    theirs.to(torch.bfloat16 if masters else torch.float32)
    config = make()
    by_torchao = Float8LinearConfig(
        **{**vars(config), "emulate": True, "pad_inner_dim": False, "enable_fsdp_float8_all_gather": False}
    )
    convert_to_float8_training(theirs, config=by_torchao)
    batch = torch.randn(16, 32)
    module = L.Fabric(accelerator="cpu", plugins=plugin).setup(ours)
    output = module(batch)
    with torch.autocast("cpu", torch.bfloat16):
        expected = theirs(batch.bfloat16())
    assert torch.equal(output, expected.float())
    output.square().mean().backward()
    expected.float().square().mean().backward()
    for (fqn, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.grad, reference.grad), fqn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "rowwise"}, "`recipe='rowwise'` with `config=Float8LinearConfig"),
        ({"fp8_format": "e4m3"}, "`fp8_format='e4m3'` with `config=Float8LinearConfig"),
        ({"round_scales_to_power_of_2": True}, "`round_scales_to_power_of_2=True` with `config="),
    ],
)
def test_what_the_config_says_is_not_said_again(options, message):
    with pytest.raises(ValueError, match=message):
        FP8TorchAO(config=Float8LinearConfig(), **options)


def test_configs_that_cannot_run():
    off = Float8LinearConfig(cast_config_input=high(), cast_config_weight=high(), cast_config_grad_output=high())
    with pytest.raises(ValueError, match="disables all three GEMMs, so nothing would run in FP8"):
        FP8TorchAO(config=off)
    make = CONFIGS["grad_input in high precision"][0]
    with pytest.raises(ValueError, match=r"reads the weight in high precision, which needs .* `master_weights=True`"):
        FP8TorchAO(config=make())
    with pytest.raises(ValueError, match="`base='fp16'` is not valid with `recipe='rowwise'`"):
        FP8TorchAO(config=CONFIGS["rowwise"][0](), base="fp16")


def test_a_config_that_emulates_does_so_on_a_gpu_too():
    assert FP8TorchAO(config=Float8LinearConfig(emulate=True)).emulates(torch.device("cuda"))
    assert not FP8TorchAO(config=Float8LinearConfig()).emulates(torch.device("cuda"))
