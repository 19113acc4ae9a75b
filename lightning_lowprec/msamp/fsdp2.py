"""Weights of codes under FSDP2 (MS-AMP's O3): e4m3 codes are gathered, one byte per element.

:func:`shard_codes` lets ``fully_shard`` cut the float16 and the e4m3 codes of a MsampWeight together. FSDP2 gathers the
e4m3 codes, into a MsampWeight of these alone. The optimizer steps the float16 codes of this rank, and rounds them.

The scales belong to the whole weight, and every rank has them: a write to a shard, and loading a state dict, are
collectives. A step takes one all-reduce for its new scales, per group of parameters.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.msamp.linear import scaled_linears
from lightning_lowprec.msamp.weight import MsampWeight
from lightning_lowprec.msamp.weight_state import required_state_of
from lightning_lowprec.private.torch import local_tensor


def shard_codes(model: nn.Module, shards: int, options: Any) -> Callable[[DeviceMesh], None]:
    """Check options, and make weights ready to be sharded by FSDP2 into ``shards`` parts: ``Backend.shard_codes``.

    The returned function, called after ``fully_shard`` and before the optimizer is made, lets optimizers and state
    dicts find codes and scales.
    """
    wrong = {
        "tensor_parallel": options.tensor_parallel is not None,
        "cpu_offload": options.cpu_offload,
        "sync_module_states": options.sync_module_states,
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ValueError(
            f"`{name}={getattr(options, name)!r}` does not go with weights that are kept as codes (MS-AMP) yet. Leave"
            " it out; build the same weights on every rank."
        )
    if any(t.is_meta for t in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is on the meta device, where weights have no values to keep as codes (MS-AMP)."
            " Build it on a real device on every rank, from one seed or one checkpoint."
        )
    layers = scaled_linears(model)
    for fqn, layer in layers.items():
        rows = layer.weight.shape[0]  # [in, out] in a Conv1D of transformers
        if rows % shards:
            side = "output" if rows == layer.out_features else "input"
            raise ValueError(
                f"{fqn!r} has {rows} {side} features, which do not divide into {shards} equal shards."
                " Leave it out of the conversion, or shard over a divisor (`replicate=`)."
            )
    for layer in layers.values():
        required_state_of(layer.weight).cutting = True
        layer.float32_gradients = True
    return lambda mesh: _collect(model, mesh)


@torch.no_grad()
def _collect(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let optimizers and state dicts find codes and scales."""
    shards = mesh.get_group(mesh.ndim - 1)
    for fqn, layer in scaled_linears(model).items():
        weight: Any = layer.weight
        shard = local_tensor(weight)
        assert shard is not weight, f"{fqn!r} was not sharded"
        assert isinstance(shard, MsampWeight)
        weight.msamp_state = shard.msamp_state
        weight.msamp_state.shards, weight.msamp_state.cutting = shards, False
