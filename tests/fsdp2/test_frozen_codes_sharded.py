"""A frozen base that is stored as codes, on two ranks: copied by DDP, cut and gathered as codes by FSDP2."""

import lightning as L
import pytest
import torch

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from tests.fsdp2.ranks import launch
from tests.torchao.test_frozen_codes import Net, X, frozen_layers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 wants gradients"),
]
RECIPES = ("tensorwise", "block")


def trained(recipe, strategy="auto", ranks=1, seed=0):
    fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=FP8TorchAO(recipe, frozen="codes"))
    fabric.launch()
    net = Net(seed)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    module, optimizer = fabric.setup(net, optimizer)
    losses = []
    for _ in range(3):
        loss = (module(X).float() - 1).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return fabric, module, optimizer, losses


def bits(model):
    stored = [t.detach() for layer in frozen_layers(model) for t in (layer.weight, layer.weight_scale)]
    return [getattr(t, "_local_tensor", t).clone() for t in stored]


def on_two_ranks(rank, ranks, folder, expected):
    for recipe in RECIPES:
        for strategy in ("ddp", FabricFSDP2Strategy(state_dict_type="sharded"), FabricFSDP2Strategy()):
            fabric, module, optimizer, losses = trained(recipe, strategy, ranks)
            assert losses == pytest.approx(expected[recipe], rel=1e-5), (recipe, strategy)
            before = bits(module)
            assert before[0].dtype is torch.uint8
            assert len(before[0]) * (1 if strategy == "ddp" else ranks) == 272
            path = folder / f"{recipe}.{type(strategy).__name__}.{getattr(strategy, '_state_dict_type', '')}"
            fabric.save(path, {"model": module, "optimizer": optimizer})
            again = "ddp" if strategy == "ddp" else FabricFSDP2Strategy()
            fabric, other, optimizer, _ = trained(recipe, again, ranks, seed=5)
            assert not torch.equal(bits(other)[0], before[0])
            fabric.load(path, {"model": other, "optimizer": optimizer})
            assert all(map(torch.equal, bits(other), before)), (recipe, strategy)


def test_two_ranks_train_save_and_load_the_codes(tmp_path):
    expected = {recipe: trained(recipe)[3] for recipe in RECIPES}
    launch(on_two_ranks, 2, tmp_path, tmp_path, expected)
