"""FP8 layers under torch's `context_parallel` on CUDA: ring attention runs, and every product of the layers is FP8."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ledger.entry import format_of
from benchmarks.ledger.recorder import recording
from benchmarks.ledger.world_case import OneOfMany
from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from tests.ledger.counted import fake_world

RANKS, TOKENS, WIDTH = 4, 64, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_step(recipe):
    fake_world(RANKS)
    strategy = FabricFSDP2Strategy(cluster_environment=OneOfMany(RANKS))
    plugin = FP8TorchAO(recipe=recipe, compile=False)
    fabric = L.Fabric(accelerator="cuda", devices=1, num_nodes=RANKS, strategy=strategy, plugins=plugin)
    fabric.launch()
    model = fabric.setup_module(nn.Sequential(nn.Embedding(32, WIDTH), Attention(), Attention()))
    mesh = fabric.strategy.device_mesh["data_parallel"]
    x = torch.zeros(2, TOKENS * RANKS, dtype=torch.int64, device=fabric.device)
    for _ in range(2):
        with (
            recording() as log,
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        ):
            assert x.shape == (2, TOKENS)
            fabric.backward(model(x).float().mean())
    formats = [format_of(record) for record in log.of("gemm")]
    assert len(formats) == 2 * 4 * 3, "two blocks of four layers, three products each"
    assert all(name.startswith("float8") for name in formats)
    for kernel in ("flash_fwd", "flash_bwd_dq_dk_dv"):
        parts = sum(kernel in record.name for record in log.of("kernel"))
        assert parts == 2 * RANKS, "a part of keys and values per block and rank"
    dist.destroy_process_group()
