"""Sharded checkpoints that Lightning's FSDPStrategy (FSDP1) and ModelParallelStrategy wrote, under ours."""

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.strategies.fsdp import _get_sharded_state_dict_context
from torch import distributed as dist
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from tests.fsdp2.ranks import launch
from tests.fsdp2.test_resume_trainer import fit
from tests.fsdp2.toy import Toy, X, Y, adamw, assert_same, full, setup, train

pytestmark = pytest.mark.distributed


class OnCPU(FabricFSDP):
    """Lightning's own saving code; its connector refuses CPU, and it casts nothing here."""

    @property
    def root_device(self):
        return torch.device("cpu")

    def broadcast(self, value, src=0):
        return value


def by_fsdp1(folder):
    """A model trained by FSDP1, and its checkpoints as Fabric and as the Trainer write them."""
    torch.manual_seed(0)
    module = Toy(1)
    module.blocks[0] = torch.compile(module.blocks[0], backend="eager")  # its names have a part more
    decayed = [fqn for fqn, p in module.named_parameters() if p.ndim > 1]  # FSDP1 flattens
    model = FSDP(module, use_orig_params=True, device_id=torch.device("cpu"))
    groups = {True: [], False: []}
    for fqn, p in model.named_parameters():
        groups[fqn.removeprefix("_fsdp_wrapped_module.") in decayed].append(p)
    optimizer = torch.optim.AdamW([{"params": groups[False], "weight_decay": 0.0}, {"params": groups[True]}], lr=1e-2)
    for step in range(3):
        rows = slice(8 * (2 * step + dist.get_rank()), 8 * (2 * step + dist.get_rank()) + 8)
        torch.nn.functional.cross_entropy(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    strategy = OnCPU(state_dict_type="sharded")
    strategy.save_checkpoint(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
    (folder / "trainer.ckpt").mkdir(exist_ok=True)
    dist.barrier()
    with _get_sharded_state_dict_context(model):
        shards = {"model": model.state_dict(), "optimizer_0": FSDP.optim_state_dict(model, optimizer)}
    save(shards, checkpoint_id=folder / "trainer.ckpt")  # as its `save_checkpoint` does
    return read_by_torch(folder / "fabric.ckpt")


def read_by_torch(path):
    """By torch's own converter. (FSDP1's `full_optim_state_dict` mixes up the moments on CPU.)"""
    whole = path.with_name(f"whole.{dist.get_rank()}")
    dcp_to_torch_save(path, whole)
    content = torch.load(whole, weights_only=True)
    assert any((entry["exp_avg"] < 0).any() for entry in content["optimizer"]["state"].values())
    assert [len(group["params"]) for group in content["optimizer"]["param_groups"]] == [9, 5]
    parts = content["model"], content["optimizer"]["state"]
    return [{name.replace("_orig_mod.", ""): value for name, value in part.items()} for part in parts]


def trainers_rest(folder):
    trainer, _, _ = fit("32-true", 2, 1)
    trainer.save_checkpoint(folder / "any.ckpt")
    if dist.get_rank() == 0:
        rest = torch.load(folder / "any.ckpt" / "meta.pt", weights_only=True)
        del rest["lightning_lowprec_save"]  # Lightning's has none
        torch.save(rest, folder / "trainer.ckpt" / "meta.pt")
    dist.barrier()


def check(model, optimizer, truth, name):
    weights, moments = truth
    loaded = full(dict(model.state_dict()))
    names = {id(p): fqn for fqn, p in model.named_parameters()}
    for fqn, weight in weights.items():
        assert torch.equal(loaded[fqn].float(), weight.float()), f"{name}: {fqn}"
    assert len(optimizer.state) == len(names)
    for p, entry in optimizer.state.items():
        fqn = names[id(p)].removeprefix("_forward_module.")
        assert_same({k: full(v) for k, v in entry.items()}, dict(moments[fqn]), f"{name}: {fqn}")


def fsdp1(rank, ranks, folder):
    fabric, *_ = setup("32-true", ranks)  # makes the process group
    truth = by_fsdp1(folder)
    trainers_rest(folder)
    for precision in ("32-true", "fp8-hybrid"):
        fabric, model, optimizer = setup(precision, ranks, seed=5)
        received = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(folder / "fabric.ckpt", received)
        assert received["step"] == 3
        check(model.module, optimizer.optimizer, truth, precision)
        train(fabric, model, optimizer, range(3, 4), ranks)
    look = fit("fp8-hybrid", ranks, 2, seed=5, path=folder / "trainer.ckpt")[2]
    for fqn, weight in truth[0].items():
        assert torch.equal(look.restored["model"][fqn], weight), fqn
    steps = {entry["step"].item() for entry in look.restored["optimizer"]["state"].values()}
    assert steps == {3.0}
    model_parallel(rank, ranks, folder)
    says_what_is_wrong(rank, ranks, folder)


def model_parallel(rank, ranks, folder):
    def shard(module, mesh):
        for block in module.blocks:
            fully_shard(block, mesh=mesh["data_parallel"])
        return fully_shard(module, mesh=mesh["data_parallel"])

    for kind in (True, False):
        strategy = ModelParallelStrategy(
            shard, data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=kind
        )
        fabric = L.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
        fabric.launch()
        module = fabric.setup_module(Toy(2))
        optimizer = fabric.setup_optimizers(adamw(module.module))
        train(fabric, module, optimizer, range(3), ranks)
        path = folder / f"model_parallel.{kind}.ckpt"
        fabric.save(path, {"model": module, "optimizer": optimizer, "critic": (critic := torch.nn.Linear(2, 2))})
        names = {id(p): fqn for fqn, p in module.module.named_parameters()}
        weights = full(dict(module.module.state_dict()))
        moments = {names[id(p)]: full(dict(entry)) for p, entry in optimizer.optimizer.state.items()}
        losses = train(fabric, module, optimizer, range(3, 5), ranks)
        fabric, model, optimizer = setup("32-true", ranks, seed=5)
        received = {"model": model, "optimizer": optimizer, "critic": torch.nn.Linear(2, 2)}
        fabric.load(path, received)
        assert_same(received["critic"].state_dict(), fabric.broadcast(critic.state_dict()), "what is not sharded")
        check(model.module, optimizer.optimizer, (weights, moments), path.name)
        assert train(fabric, model, optimizer, range(3, 5), ranks) == losses


def says_what_is_wrong(rank, ranks, folder):
    fabric, model, optimizer = setup("32-true", ranks)
    path = folder / "fabric.ckpt"
    headless = torch.optim.AdamW([p for n, p in model.named_parameters() if "head" not in n])
    headless, one_group = map(fabric.setup_optimizers, (headless, torch.optim.AdamW(model.parameters())))
    wider = setup("32-true", ranks, width=16)[1]
    for given, received, error, message in (
        (path, {"net": model}, KeyError, "holds nothing under 'net'; it holds: model, optimizer"),
        (path, {"model": model, "adam": optimizer}, KeyError, "holds nothing under 'adam'; it holds: model, optimizer"),
        (path, {"model": model, "epoch": 0}, KeyError, "nothing under 'epoch'; it holds: model, optimizer, step"),
        (folder / "nowhere.ckpt", {"model": model}, FileNotFoundError, "there is no checkpoint at"),
        (folder, {"model": model}, ValueError, "is no sharded checkpoint of Lightning or of this package"),
        (path, {"optimizer": optimizer}, ValueError, "found no sharded model in the state"),
        (
            path, {"model": model, "optimizer": headless}, ValueError,
            "does not hold the parameters of the optimizer.*'head.bias'",
        ),
        (path, {"model": model, "optimizer": one_group}, ValueError, "are in 2 groups of 'optimizer'"),
        (path, {"model": wider}, ValueError, "in the checkpoint and .* in the model"),
        (path, model, ValueError, "fabric.ckpt' is a folder; `fabric.load_raw` loads the file"),
        (path, None, ValueError, "`state=NoneType` is not valid; expected a model"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            fabric.load(given, received)
    assert fabric.load(path, {"model": model, "adam": optimizer, "epoch": 7}, strict=False) == {"step": 3}
    whole, other, _ = setup("32-true", ranks, kind="full")
    parts = {"model": lambda name, _: name == "head.bias", "notes": lambda _, value: value > 1}
    whole.save(folder / "part.ckpt", {"model": other, "notes": {"a": 1, "b": 2}}, filter=parts)
    saved = torch.load(whole.broadcast(folder / "part.ckpt"), weights_only=True)
    assert (list(saved["model"]), saved["notes"]) == (["head.bias"], {"b": 2})
    with pytest.raises(KeyError, match=r"Missing in the checkpoint: \['blocks\.0\..*Pass `strict=False`"):
        fabric.load(folder / "part.ckpt", {"model": other})
    assert fabric.load(folder / "part.ckpt", {"model": other}, strict=False) == {"notes": {"b": 2}}
    with pytest.raises(ValueError, match=r"2 sharded models \(a, b\)"):
        fabric.save(folder / "two.ckpt", {"a": model, "b": other})
    with pytest.raises(NotImplementedError, match="state_dict_type='full'"):
        fabric.save(folder / "filtered.ckpt", {"model": model}, filter={"model": lambda k, v: True})


@pytest.mark.slow
def test_under_fsdp2(tmp_path):
    launch(fsdp1, 2, tmp_path, tmp_path)
