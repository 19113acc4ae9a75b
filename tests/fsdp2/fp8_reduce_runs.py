"""What four ranks do under `fp8_reduce=True`, each beside the gradients that every rank has before they are reduced."""

import lightning as L
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp2.models import Block, batch, full, loss_of
from tests.fsdp2.volume_runs import QUIET
from tests.toys import Task

RANKS = 4
STEPS = 3


class Odd(nn.Module):
    """Rows that do not divide, a tied head, frozen weights, and biases that share blocks of 128 with weights."""

    def __init__(self, rows: int = 33):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(rows, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].up.weight.requires_grad_(False)
        self.odd = nn.Linear(64, 7)
        self.back = nn.Linear(7, 64, bias=False)
        self.lm_head = nn.Linear(64, rows, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x + self.back(self.odd(x)))


def local_gradients(data_ranks, steps=(0,)):
    """The gradients of every rank's batches, by name; on one process, in float32."""
    model, found = Odd(), []
    for rank in range(data_ranks):
        model.zero_grad()
        for step in steps:
            loss_of(model, batch(step, rank)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    return found


def sgd(module):
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.01)


class Wire:
    """The bytes that this rank sends to others, by collective: rings for reductions, all but its own part else."""

    def __init__(self):
        self.sent = {}

    def __enter__(self):
        self.originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce")}
        for name, original in self.originals.items():
            setattr(dist, name, self.counting(name, original))
        return self

    def counting(self, name, original):
        def counted(tensor, *args, group=None, **kwargs):
            ranks = dist.get_world_size(group)
            times = 2 if name == "all_reduce" else 1
            size = times * tensor.numel() * tensor.element_size() * (ranks - 1) // ranks
            self.sent[name, str(tensor.dtype)] = self.sent.get((name, str(tensor.dtype)), 0) + size
            return original(tensor, *args, group=group, **kwargs)

        return counted

    def __exit__(self, *error):
        for name, original in self.originals.items():
            setattr(dist, name, original)


def fabric_for(precision="32-true", **options):
    from lightning_lowprec import FabricFSDP2Strategy

    strategy = FabricFSDP2Strategy(**{"fp8_reduce": True, **options})
    fabric = L.Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def gradients(data_rank, prepare=lambda net: None, steps=(0,), **options):
    """The gathered gradients of one step, and what was sent for them."""
    from lightning_lowprec.fsdp2 import strategy as sharding

    fabric = fabric_for(**options)
    net = Odd()
    model = fabric.setup_module(net)
    prepare(net)
    for step in steps:
        with Wire() as wire, fabric.no_backward_sync(model, enabled=step != steps[-1]):
            fabric.backward(loss_of(model, batch(step, data_rank)))
    traffic = sharding._sharded[net].sharded.traffic
    reductions = list(traffic.reductions.values())
    return {
        "gradients": {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None},
        "local": [p.grad.to_local() for p in net.parameters() if p.grad is not None],
        "dtypes": {str(p.grad.dtype) for p in net.parameters() if p.grad is not None},
        "wire": wire.sent,
        "sent": sum(r.sent for r in reductions),
        "values": sum(r.values for r in reductions),
        "calls": sum(r.calls for r in reductions),
        "line": traffic.report(),
    }


def colwise_rowwise(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def divided_by(factor):
    def prepare(net):
        for module in net.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(factor)

    return prepare


def trained(rank, precision, optimizer_class, **options):
    fabric = fabric_for(precision, **options)
    net = Odd(rows=32)
    model, optimizer = fabric.setup(net, optimizer_class([p for p in net.parameters() if p.requires_grad], lr=0.01))
    for step in range(STEPS):
        fabric.backward(loss_of(model, batch(step, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return full(net)


def lost_step(rank, lost, **options):
    """fp16 with loss scaling: one rank's gradient of one weight has a NaN or an inf; the weights before and after."""
    fabric = fabric_for("16-mixed", **options)
    net = Odd()
    model, optimizer = fabric.setup(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    before = full(net)
    loss = loss_of(model, batch(0, rank))
    if rank == 3:
        net.back.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([17]), lost))
    fabric.backward(loss)
    found = {
        name: p.grad.full_tensor().isfinite().all().item() for name, p in net.named_parameters() if p.requires_grad
    }
    optimizer.step()
    return found, all(torch.equal(w, full(net)[name]) for name, w in before.items())


def by_trainer(rank):
    from lightning_lowprec import FSDP2Strategy

    module = Task(Odd(rows=32), loss_of, sgd)
    trainer = L.Trainer(
        accelerator="cpu", devices=RANKS, strategy=FSDP2Strategy(fp8_reduce=True), precision="32-true",
        max_steps=STEPS, **QUIET,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader([batch(step, rank) for step in range(STEPS)], batch_size=None))
    return full(module.net)


def stages_by_data():
    """Two stages of a pipeline, each sharded over two ranks; the gradients of this rank's stage."""
    from tests.fsdp2.parallel_runs import pipeline

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "data"))
    number, data_rank = mesh.get_coordinate()
    group = mesh["stages"].get_group()
    options = {"fp8_reduce": True, "param_dtype": torch.float32}
    return pipeline(number, "bf16", "Schedule1F1B", mesh["data"], group=group, data_rank=data_rank, **options)[1]


def worker(rank):
    tensor = {"tensor_parallel": colwise_rowwise, "tensor_parallel_size": 2}
    ways = {
        "shards": gradients(rank),
        "copies": gradients(rank, replicate=2),
        "copies only": gradients(rank, replicate=4),
        "tensor parallel": gradients(rank // 2, **tensor),
        "bf16 buffers": gradients(rank, reduce_dtype=torch.bfloat16),
        "two batches, copies": gradients(rank, steps=(0, 1), replicate=2),
        "divided by 2": gradients(rank, prepare=divided_by(2.0)),
        "divided by 2, copies": gradients(rank, prepare=divided_by(2.0), replicate=2),
    }
    sgd = torch.optim.SGD
    trainings = {
        name: (trained(rank, name, optimizer), trained(rank, name, optimizer, fp8_reduce=False))
        for name, optimizer in (("fp8-hybrid", sgd), ("msamp-o3", sgd), ("bf16-lean", torch.optim.AdamW))
    }
    lost = {"nan": lost_step(rank, torch.nan), "inf with copies": lost_step(rank, torch.inf, replicate=2)}
    by_fabric = trained(rank, "32-true", sgd)
    return {
        "pipeline": stages_by_data(),
        "ways": ways,
        "trainings": trainings,
        "lost": lost,
        "trainer and fabric": (by_trainer(rank), by_fabric),
    }
