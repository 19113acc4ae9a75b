"""One log line that says what the all-gathers of a sharded model sent."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_lowprec.messages import in_units
from lightning_lowprec.private.fsdp2 import gathered_parameters
from lightning_lowprec.private.torch import local_tensor
from lightning_lowprec.private.torch_modules import is_batch_or_instance_norm


def gathered_line(model: nn.Module, shards: int) -> str | None:
    """Return what a rank sent in the last all-gather of each group, in one line.

    None: nothing was gathered so far, or there is one shard. ``shards``: the number of ranks that share a weight.
    """
    groups = {fqn: cast(nn.Module, m) for fqn, m in model.named_modules() if isinstance(m, FSDPModule)}
    records = {fqn: gathered_parameters(module) for fqn, module in groups.items()}
    gathered = {fqn: group for fqn, group in records.items() if any(one.all_gather_outputs for one in group)}
    if shards == 1 or not gathered:
        return None
    codes = [(fqn, one) for fqn, group in gathered.items() for one in group if _sends_codes(one)]
    for fqn, record in codes:
        wide = next((_name(sent.dtype) for sent in record.all_gather_outputs if sent.dtype.itemsize > 1), None)
        if wide is not None:
            raise RuntimeError(
                f"the weights of {fqn or 'the root'!r} were to be gathered as float8, but {wide} was sent. Use"
                " `fp8_all_gather=False`, and please report it."
            )
    blocks = [group for fqn, group in gathered.items() if fqn and not is_batch_or_instance_norm(groups[fqn])]
    unit = "block" if blocks else "gather"
    blocks = blocks or list(gathered.values())
    sent = [tensor for group in blocks for one in group for tensor in one.all_gather_outputs]
    size = sum(tensor.nbytes for tensor in sent) / shards
    in_bf16 = sum(2 * local_tensor(one.sharded_param).numel() for group in blocks for one in group)
    dtype = "float8" if codes else " and ".join(sorted({_name(tensor.dtype) for tensor in sent}))
    of_bf16 = size / max(in_bf16, 1)  # a rank that has nothing of a group sends padding only
    return f"all-gather: {dtype}, {in_units(size / len(blocks))} per {unit} and rank, {of_bf16:.2f}x of bf16"


def _sends_codes(record: Any) -> bool:
    return hasattr(local_tensor(record.sharded_param), "fsdp_pre_all_gather")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
