"""One training step under FSDP2 as a torchao user writes it, world size 1: what our strategy is timed against.

    convert (FP8 all-gather) -> fully_shard every layer, then the root -> optimizer
    per step: scales of all weights -> autocast forward -> backward -> step -> zero_grad

With one process FSDP2 casts weights to float8 as always, but sends nothing: this is the host's time, no wire's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import hook_overhead
from benchmarks.gpu_lane.process_group import group_of_one, stand_in_for_nccl


def by_hand() -> Callable[[], None]:
    """The step; the model is that of ``hook_overhead``, every layer is gathered by itself."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    device = hook_overhead.DEVICE
    model = hook_overhead.Model(by_hand=True).to(device)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=hook_overhead.EMULATE)
    convert_to_float8_training(model, config=config)
    mesh = _mesh(device)
    dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False))
    optimizer = model.configure_optimizers()
    batch = torch.randn(hook_overhead.TOKENS, hook_overhead.WIDTH, device=device)

    def step() -> None:
        precompute_float8_dynamic_scale_for_fsdp(model)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours() -> Callable[[], None]:
    """The same through Fabric, our strategy and the plugin."""
    from lightning_lowprec import FabricFSDP2Strategy

    stand_in_for_nccl(hook_overhead.DEVICE)
    return hook_overhead.fabric_step(False, FabricFSDP2Strategy(wrap=[nn.Linear]))


def _mesh(device: torch.device) -> Any:
    """Over the group that there is, or a group of this process alone."""
    group_of_one(device)
    return init_device_mesh(device.type, (1,))
