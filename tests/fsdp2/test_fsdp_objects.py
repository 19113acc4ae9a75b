"""Lightning's FSDPStrategy objects on two gloo ranks: what they become trains as the same choices made with ours."""

import inspect

import lightning as L
import pytest
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.distributed.tensor import DTensor

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.tools.demo import Block, ByteGPT
from tests.fsdp2.gathers import count_gathers
from tests.fsdp2.ranks import run
from tests.toys import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 3
QUIET = {**QUIET, "use_distributed_sampler": False}
FACTORIES = {
    "fsdp": {
        "auto_wrap_policy": {Block},
        "activation_checkpointing_policy": {Block},
        "sharding_strategy": "SHARD_GRAD_OP",
    },
    "ours": {"wrap": [Block], "activation_checkpointing": [Block], "reshard_after_forward": False},
}
counted = {}


def model(seed=0):
    torch.manual_seed(seed)
    return ByteGPT(depth=2, width=32, heads=2, block_size=16, lr=1e-2)


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randint(0, 256, (2, 16), generator=generator) for _ in range(2)) for _ in range(STEPS)]


def by_trainer(strategy, net, precision="fp8-hybrid"):
    losses = []

    class Note(L.Callback):
        def on_train_start(self, trainer, module):
            counted[module] = count_gathers(module)

        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            losses.append(outputs["loss"].item())

    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=precision, max_epochs=1, callbacks=[Note()], **QUIET
    )
    data = batches(trainer.global_rank)
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=None))
    return losses, trainer


def by_fabric(strategy, net, precision="fp8-hybrid"):
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    fabric.launch()
    optimizer = net.configure_optimizers()["optimizer"]
    wrapped, optimizer = fabric.setup(net, optimizer)
    counted[net] = count_gathers(net)
    losses = []
    for x, y in batches(fabric.global_rank):
        loss = torch.nn.functional.cross_entropy(wrapped(x).float().flatten(0, 1), y.flatten())
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, fabric


def sharded_as(net):
    """What FSDP2 has made of a model: its groups, and the layout of its parameters."""
    layouts = {str(p.placements) for p in net.parameters() if isinstance(p, DTensor)}
    meshes = {tuple(p.device_mesh.mesh.shape) for p in net.parameters() if isinstance(p, DTensor)}
    return {
        "groups": [fqn for fqn, module in net.named_modules() if isinstance(module, FSDPModule)],
        "layouts": sorted(layouts),
        "meshes": sorted(meshes),
        "gathers": {f: sum(g.calls.values()) for f, g in counted[net].items()},
        "dtypes": sorted({str(d) for g in counted[net].values() for d in g.sent}),
    }


def flavours(seen):
    """The same choices as Lightning's object and as ours, in Trainer and Fabric."""
    for loop, made in ((by_trainer, (FabricFSDP, FSDP2Strategy)), (by_fabric, (TrainerFSDP, FabricFSDP2Strategy))):
        for make in made:
            net = model()
            ours = make in (FSDP2Strategy, FabricFSDP2Strategy)
            losses, _ = loop(make(**FACTORIES["ours" if ours else "fsdp"]), net)
            seen[loop.__name__, ours] = {"losses": losses, **sharded_as(net)}


def hybrid(seen):
    """Two copies of one shard, and one copy of two shards, in dtypes of the user's."""
    for mesh in ((2, 1), (1, 2)):
        net = model()
        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        strategy = TrainerFSDP(sharding_strategy="HYBRID_SHARD", device_mesh=mesh, mixed_precision=mixed)
        by_trainer(strategy, net, "half-auto")
        seen[mesh] = {**sharded_as(net), "buffer": str(net.turn.dtype)}


def synced(seen):
    """Ranks that build different models train that of rank 0 if asked to, and a mixture of their own if not."""
    for asked in (True, False):
        rank = int(torch.distributed.get_rank())
        net = model(seed=rank)
        net.turn.add_(rank)
        first = model(seed=0)
        fabric = L.Fabric(
            accelerator="cpu", devices=2, strategy=FabricFSDP(sync_module_states=asked), precision="fp8-hybrid"
        )
        fabric.launch()
        fabric.setup(net, net.configure_optimizers()["optimizer"])
        same = all(
            torch.equal(a.full_tensor(), b) for a, b in zip(net.parameters(), first.parameters(), strict=True)
        ) and torch.equal(net.turn, first.turn)
        seen[f"synced {asked}"] = same


class Short(ByteGPT):
    """Steps with fewer and with more arguments than usual; the Trainer reads their signatures."""

    def training_step(self, batch):
        return super().training_step(batch, 0)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log(f"loss {dataloader_idx} {batch_idx}", super()._loss(batch), add_dataloader_idx=False)


def signatures(seen):
    torch.manual_seed(0)
    net = Short(depth=2, width=32, heads=2, block_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="fsdp2",
        precision="bf16-mixed",
        max_steps=1,
        num_sanity_val_steps=0,
        **QUIET,
    )
    loader = torch.utils.data.DataLoader(batches(0)[:1], batch_size=None)
    trainer.fit(net, loader, [loader, loader])
    seen["signatures"] = sorted(name for name in trainer.callback_metrics if name.startswith("loss"))
    seen["parameters"] = [str(inspect.signature(getattr(net, f"{n}_step"))) for n in ("training", "validation")]
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    seen["sharded after evaluation"] = all(isinstance(p, DTensor) for p in net.parameters())
    seen["overridden"] = [name for name in steps if is_overridden(name, net)]


def worker(rank):
    seen = {}
    for part in (signatures, flavours, hybrid, synced):
        part(seen)
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run(worker, 2, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("loop", ["by_trainer", "by_fabric"])
def test_lightnings_object_and_ours_train_alike(seen, loop):
    for rank in seen:
        one = rank[loop, True]
        assert rank[loop, False] == one
        assert one["groups"] == ["", "blocks.0", "blocks.1"]
        assert one["layouts"] == ["(Shard(dim=0),)"]
        assert one["gathers"] == {"": STEPS, "blocks.0": STEPS, "blocks.1": STEPS}, "SHARD_GRAD_OP gathers once a step"
        assert "torch.uint8" in one["dtypes"], "the wire dtype of groups with FP8 weights"
    losses = [rank[loop, False]["losses"] for rank in seen]
    assert losses[0] != losses[1], "the ranks saw the same data"


def test_hybrid_sharding_and_an_explicit_mixed_precision(seen):
    for rank in seen:
        two, one = rank[2, 1], rank[1, 2]
        assert (two["meshes"], two["layouts"]) == ([(2, 1)], ["(Replicate(), Shard(dim=0))"])
        assert (one["meshes"], one["layouts"]) == ([(2,)], ["(Shard(dim=0),)"])
        assert one["gathers"]["blocks.0"] == 2 * STEPS, "HYBRID_SHARD frees weights after forward"
        assert (one["dtypes"], one["buffer"]) == (["torch.bfloat16"], "torch.bfloat16")


def test_sync_module_states(seen):
    assert [rank["synced True"] for rank in seen] == [True, True]
    assert [rank["synced False"] for rank in seen] == [False, False], "the ranks had the same model anyway"


def test_the_trainer_sees_the_signatures_of_the_users_steps(seen):
    for rank in seen:
        assert rank["signatures"] == ["loss 0 0", "loss 1 0"]
        assert rank["parameters"] == ["(batch)", "(batch, batch_idx, dataloader_idx=0)"]
        assert rank["overridden"] == ["training_step", "validation_step"], "a step that is not the user's is left alone"
        assert rank["sharded after evaluation"]
