"""Every GEMM of a layer of `FP8TorchAO` is that of torchao's own conversion with the same recipe, bit for bit."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingType, e4m3_dtype

from lightning_lowprec import FP8TorchAO
from lightning_lowprec.fsdp2.options import ShardOptions


def high():
    return CastConfig(scaling_type=ScalingType.DISABLED)  # a fresh one: torchao writes the dtype into it


def e4m3():
    return CastConfig(target_dtype=e4m3_dtype)


PAIRS = {
    "tensorwise": ({}, lambda: Float8LinearConfig(), True),
    "power of two": (
        {"round_scales_to_power_of_2": True},
        lambda: Float8LinearConfig(round_scales_to_power_of_2=True),
        True,
    ),
    "e4m3": (
        {"fp8_format": "e4m3"},
        lambda: Float8LinearConfig(cast_config_grad_output=e4m3(), cast_config_grad_output_for_grad_weight=e4m3()),
        True,
    ),
    "gw in high precision": (
        {"recipe": {"*": {"grad_weight": "bf16"}}},
        lambda: Float8LinearConfig(
            cast_config_input_for_grad_weight=high(), cast_config_grad_output_for_grad_weight=high()
        ),
        True,
    ),
    "grad_input in high precision": (
        {"recipe": {"*": {"grad_input": "bf16"}}, "master_weights": True},
        lambda: Float8LinearConfig(
            cast_config_weight_for_grad_input=high(), cast_config_grad_output=high(),
            cast_config_grad_output_for_grad_weight=CastConfig(),
        ),
        True,
    ),
    "rowwise": ({"recipe": "rowwise"}, lambda: Float8LinearConfig.from_recipe_name("rowwise"), False),
    "rowwise_with_gw_hp": (
        {"recipe": "rowwise_with_gw_hp"},
        lambda: Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_every_gemm_is_torchaos(name):
    options, config, gathered = PAIRS[name]
    plugin = FP8TorchAO(**options)
    assert (plugin.gathers(ShardOptions()) is None) is gathered
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    theirs = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    theirs.load_state_dict(ours.state_dict())
    theirs.to(torch.bfloat16 if "master_weights" in options else torch.float32)
    convert_to_float8_training(theirs, config=replace(config(), emulate=True))
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
