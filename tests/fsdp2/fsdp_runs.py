"""Two ranks train under translated FSDPStrategy objects; each returns what it saw."""

import contextlib
import inspect

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy as FabricFSDP
from lightning.pytorch.strategies import FSDPStrategy as TrainerFSDP
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.fsdp import FSDPModule, MixedPrecision
from torch.distributed.tensor import DTensor

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.fsdp2 import strategy as sharding
from lightning_lowprec.tools.demo import Block, ByteGPT
from tests.toys import QUIET

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


def model(seed=0):
    torch.manual_seed(seed)
    return ByteGPT(depth=2, width=32, heads=2, block_size=16, lr=1e-2)


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randint(0, 256, (2, 16), generator=generator) for _ in range(2)) for _ in range(STEPS)]


def by_trainer(strategy, net, precision="fp8-hybrid"):
    losses = []

    class Note(L.Callback):
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
        "gathers": {f: sum(g.calls.values()) for f, g in sharding._sharded[net].sharded.traffic.gathers.items()},
        "dtypes": sorted({str(d) for g in sharding._sharded[net].sharded.traffic.gathers.values() for d in g.sent}),
    }


def flavours(seen):
    """The same choices as Lightning's object and as ours, of either flavour, in Trainer and Fabric."""
    for loop in (by_trainer, by_fabric):
        for make in (TrainerFSDP, FabricFSDP, FSDP2Strategy, FabricFSDP2Strategy):
            net = model()
            choices = FACTORIES["fsdp" if make in (TrainerFSDP, FabricFSDP) else "ours"]
            losses, _ = loop(make(**choices), net)
            seen[f"{loop.__name__} {make.__module__.split('.')[1]} {make.__name__}"] = {
                "losses": losses,
                **sharded_as(net),
            }


def hybrid(seen):
    meshes = {"(2, 1)": (2, 1), "(1, 2)": (1, 2), "nodes": None}
    for name, mesh in meshes.items():
        net = model()
        given = {"device_mesh": mesh} if mesh else {"auto_wrap_policy": {Block}}
        by_trainer(TrainerFSDP(sharding_strategy="HYBRID_SHARD", **given), net)
        seen[f"hybrid {name}"] = sharded_as(net)
    with contextlib.suppress(ValueError):
        try:
            by_trainer(TrainerFSDP(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)), model())
        except ValueError as error:
            seen["mesh of 8"] = str(error)
            raise


def dtypes(seen):
    net = model()
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    by_trainer(TrainerFSDP(mixed_precision=mixed, auto_wrap_policy={Block}), net, "half-auto")
    seen["mixed precision"] = {**sharded_as(net), "buffer": str(net.turn.dtype)}


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
    for part in (signatures, flavours, hybrid, dtypes, synced):
        part(seen)
    return seen
