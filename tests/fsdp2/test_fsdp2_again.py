"""A model that is set up a second time stays sharded as it was, and says so where something else was asked for."""

import pytest
import torch
from lightning.fabric.plugins import Precision
from torch import distributed as dist
from torch import nn

from lightning_lowprec.fsdp2.meshes import make_mesh
from lightning_lowprec.fsdp2.options import ShardOptions
from lightning_lowprec.fsdp2.strategy import Sharding
from tests.fsdp2.models import Net

CPU = torch.device("cpu")


@pytest.fixture
def apply():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = make_mesh(CPU, 1, 1, 1)
    yield lambda model, **options: Sharding(ShardOptions(**options)).apply(model, mesh, Precision(), CPU)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({}, {"activation_checkpointing": True}, "activation_checkpointing=False"),
        ({"fp8_all_gather": False}, {}, "fp8_all_gather=False"),
        ({"wrap": [nn.Linear]}, {"wrap": "auto"}, r"wrap=\[<class 'torch.nn.modules.linear.Linear'>\]"),
        ({"reshard_after_forward": True, "param_dtype": torch.bfloat16}, {}, "reshard_after_forward=True, param_dtype"),
    ],
)
def test_other_options_warn(apply, first, second, kept):
    model = Net()
    apply(model, **first)
    with pytest.warns(UserWarning, match=f"Net stays sharded as it was, with {kept}"):
        apply(model, **second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"wrap": (nn.Linear, nn.LayerNorm)}, {"wrap": [nn.LayerNorm, nn.Linear]}),
        ({"wrap": lambda fqn, module: fqn == "lm_head"}, {"wrap": lambda fqn, module: fqn == "lm_head"}),
        ({"sync_module_states": True}, {}),
    ],
)
def test_the_same_options_do_not(apply, first, second):
    model = Net()
    apply(model, **first)
    apply(model, **second)
