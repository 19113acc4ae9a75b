"""Which optimizers of torchao FSDP2 refuses, and what its errors say to take instead."""

import pytest
import torch
from torch import nn

from lightning_lowprec import FSDP2Strategy


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "_AdamW"])
def test_optimizers_of_torchao_that_keep_their_state_as_codes(name):
    from torchao import optim

    optimizer = type("Own", (getattr(optim, name),), {})(nn.Linear(4, 4).parameters())
    if name == "_AdamW":  # its state is float32
        FSDP2Strategy().sharding.follow(optimizer)
        return
    with pytest.raises(ValueError, match=r"`Own` of torchao does not run under 'fsdp2'.*`precision='bf16-8bit'`"):
        FSDP2Strategy().sharding.follow(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_optimizer_of_torchao_that_offloads(dtype):
    from torchao.optim import CPUOffloadOptimizer

    optimizer = CPUOffloadOptimizer.__new__(CPUOffloadOptimizer)  # its constructor asks for a GPU
    optimizer.optim_dict, optimizer.d_param_groups = {}, [{"params": list(nn.Linear(4, 4, dtype=dtype).parameters())}]
    if dtype is torch.float32:
        FSDP2Strategy().sharding.follow(optimizer)
        return
    with pytest.raises(ValueError, match="does not run under 'fsdp2', where it does not update half-precision weights"):
        FSDP2Strategy().sharding.follow(optimizer)
