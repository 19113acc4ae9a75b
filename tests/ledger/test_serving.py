"""``fp8_state`` on CUDA: what each backend's weights become; the host waits for nothing."""

import lightning as L
import pytest
import torch
from torch import nn

import lightning_lowprec
from benchmarks.ledger.recorder import recording
from lightning_lowprec import FP8TE, MSAMP, FP8TorchAO
from lightning_lowprec.conversion import backends

PLUGINS = {
    "tensorwise": (lambda: FP8TorchAO(compile=False), "tensor"),
    "rowwise": (lambda: FP8TorchAO("rowwise", compile=False), "row"),
    "msamp-o3": (lambda: MSAMP("O3", compile=False), "tensor"),
    "delayed": (lambda: FP8TE("delayed"), "tensor"),
    "current": (lambda: FP8TE("current"), "tensor"),
    "block": (lambda: FP8TE("block"), "block"),
}


@pytest.mark.filterwarnings("ignore:.*are expected to be slower in FP8")
@pytest.mark.filterwarnings("ignore:The model passed to `Fabric.setup")
@pytest.mark.parametrize("name", PLUGINS)
def test_codes_and_scales_are_made_on_the_gpu(name):
    plugin, scale_per = PLUGINS[name]
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin())
    model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 128))
    fabric.setup(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    roundings = backends.owner(model[0]).weight_roundings(model[0])
    assert {weight: rounding.scale_per for weight, rounding in roundings.items()} == {"weight": scale_per}
    with recording() as log:
        found = dict(lightning_lowprec.fp8_state(model, format="hf-fp8-block"))
    assert log.waits() == []
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    shapes = {weight: (tensor.dtype, tuple(tensor.shape)) for weight, tensor in found.items() if tensor.dim() == 2}
    assert shapes == {
        "0.weight": (torch.float8_e4m3fn, (512, 256)),
        "0.weight_scale_inv": (torch.float32, (4, 2)),
        "2.weight": (torch.float8_e4m3fn, (128, 512)),
        "2.weight_scale_inv": (torch.float32, (1, 4)),
    }
