"""A frozen base that is stored as codes, on ranks: copied by DDP, cut and gathered as codes by FSDP2; refusals."""

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_lowprec import FabricFSDP2Strategy, FP8TorchAO
from tests.fsdp2.ranks import launch
from tests.fsdp2.toy import fabric_for
from tests.torchao.test_frozen_codes import Net, X, frozen_layers, peft_model
from tests.toys import convert, stepped

NEW = torch.__version__ >= "2.13"
RECIPES = ("tensorwise", "block")
WIDE = torch.randn(16, 272, generator=torch.Generator().manual_seed(0))


def trained(recipe, strategy="auto", ranks=1, seed=0):
    fabric, net = fabric_for(FP8TorchAO(recipe, frozen="codes"), ranks, strategy=strategy), Net(seed, 272, 144)
    for weight in (p.data for p in net.parameters() if p.ndim == 2 and not p.requires_grad):
        weight *= torch.logspace(0, -2, len(weight))[:, None]  # tiles of 128 rows have scales of their own
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    module, optimizer = fabric.setup(net, optimizer)
    losses = ((module(WIDE).float() - 1).square().mean() for _ in range(3))
    return fabric, module, optimizer, stepped(fabric, optimizer, losses)


def bits(model):
    stored = [t.detach() for layer in frozen_layers(model) for t in (layer.weight, layer.weight_scale)]
    return [getattr(t, "_local_tensor", t).clone() for t in stored]


def on_three_ranks(rank, ranks, folder, expected):
    for recipe in RECIPES:
        for kind in ("ddp", "sharded", "full"):
            strategy = kind if kind == "ddp" else FabricFSDP2Strategy(state_dict_type=kind)
            fabric, module, optimizer, losses = trained(recipe, strategy, ranks)
            before, (expected_losses, frozen) = bits(module), expected[recipe]
            assert losses == pytest.approx(expected_losses, rel=1e-5), (recipe, kind)
            assert before[0].dtype is torch.uint8
            assert len(before[2]) == (272 if kind == "ddp" else (91, 91, 90)[rank])
            path = folder / f"{recipe}.{kind}"
            fabric.save(path, {"model": module, "optimizer": optimizer})
            if kind != "sharded":
                fabric.barrier()
                saved = torch.load(path, weights_only=True)["model"]
                assert all(torch.equal(saved[name], value) for name, value in frozen.items()), (recipe, kind)
            again = "ddp" if kind == "ddp" else FabricFSDP2Strategy()
            fabric, other, optimizer, _ = trained(recipe, again, ranks, seed=5)
            assert not torch.equal(bits(other)[0], before[0])
            fabric.load(path, {"model": other, "optimizer": optimizer})
            assert all(map(torch.equal, bits(other), before)), (recipe, kind)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not NEW, reason="FSDP2 wants gradients")
def test_three_ranks_train_save_and_load_the_codes(tmp_path):
    alone = {recipe: trained(recipe) for recipe in RECIPES}
    expected = {}
    for recipe, (_, module, _, losses) in alone.items():
        values = module.state_dict()
        expected[recipe] = losses, {name: values[name] for name in ("first.base.weight", "last.base.weight")}
    launch(on_three_ranks, 3, tmp_path, tmp_path, expected)


# ---- where such a base does not run, one sentence says what does


def test_a_layer_that_tensor_parallelism_has_cut(alone):
    model = convert(FP8TorchAO(frozen="codes"), peft_model())
    layer = model.base_model.model[0].base_layer
    parallelize_module(layer, alone, ColwiseParallel())
    message = r"stored as codes does not run with tensor parallelism.* Use `frozen='convert'`"
    with pytest.raises(RuntimeError, match=message):
        layer(X)
    codes = layer.weight.to_local().clone()
    with pytest.raises(RuntimeError, match=r"cannot be merged into a sharded weight.*`lowprec export`"):
        model.merge_adapter()
    assert torch.equal(layer.weight.to_local(), codes)


@pytest.mark.skipif(NEW, reason="FSDP2 takes weights without gradients")
def test_torch_below_2_13():
    fabric = fabric_for(FP8TorchAO(frozen="codes"), strategy=FabricFSDP2Strategy())
    with pytest.raises(RuntimeError, match=r"needs torch 2\.13, got .*Use 'ddp', or `frozen='convert'`"):
        fabric.setup_module(Net())
