"""What two ranks do with torch's parallelisms of sequences and layers, each beside what one process computes."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp2.models import Net, batch, loss_of

CPU = torch.device("cpu")
BATCHES = 4


def precisions():
    from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed

    return {
        "tensorwise": lambda: FP8TorchAO(emulate=True),
        "rowwise": lambda: FP8TorchAO(emulate=True, recipe="rowwise"),
        "msamp-o3": lambda: MSAMP("O3"),
        "bf16": lambda: HalfMixed("bf16"),
    }


def converted(precision, model):
    plugin = precisions()[precision]() if isinstance(precision, str) else precision
    plugin.bind_device(CPU)
    plugin.convert_module(model)
    return plugin, model


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def one_step(precision, model=None, prepare=lambda model: None):
    plugin, model = converted(precision, Net() if model is None else model)
    prepare(model)
    with plugin.forward_context():
        loss = loss_of(model, batch(0, 0))
    loss.backward()
    return loss.item(), gradients(model)


# ---- tensor-parallel plans over the sequence


def sequence_plan(colwise, rowwise):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(2):
        plan |= {
            f"blocks.{i}.norm": SequenceParallel(),
            f"blocks.{i}.up": colwise(input_layouts=Shard(1)),
            f"blocks.{i}.down": rowwise(output_layouts=Shard(1)),
        }
    return plan


def by_strategy(precision):
    """Under FSDP2Strategy, whose option takes the plan."""
    import lightning as L
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from lightning_lowprec import FabricFSDP2Strategy

    plan = sequence_plan(ColwiseParallel, RowwiseParallel)
    strategy = FabricFSDP2Strategy(tensor_parallel=plan, tensor_parallel_size=2, param_dtype=torch.float32)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=precisions()[precision]())
    fabric.launch()
    net = Net()
    model = fabric.setup_module(net)
    loss = loss_of(model, batch(0, 0))
    fabric.backward(loss)
    return loss.item(), gradients(net)


@contextmanager
def gloo_takes_float8():
    """torchao's float8 collectives send their codes as uint8: gloo has no float8, NCCL has."""
    from torchao.float8 import float8_ops

    table = dict(float8_ops.FLOAT8_OPS_TABLE)

    def as_bytes(handler):
        def handle(op, args, kwargs=None):
            return handler(lambda codes, *rest: op(codes.view(torch.uint8), *rest).view(codes.dtype), args, kwargs)

        return handle

    collectives = [op for op in table if "c10d_functional" in str(op)]
    float8_ops.FLOAT8_OPS_TABLE.update({op: as_bytes(table[op]) for op in collectives})
    try:
        yield
    finally:
        float8_ops.FLOAT8_OPS_TABLE.update(table)


def torchao_gathers_float8():
    """Float8 tensors of torchao 0.13, the oldest one, do not know the operation by which torch gathers."""
    from torchao.float8.float8_ops import FLOAT8_OPS_TABLE

    return torch.ops._c10d_functional._wrap_tensor_autograd.default in FLOAT8_OPS_TABLE


def float8_activations():
    """torchao's styles, whose all-gathers send activations as float8: with our layers, and with torchao's."""
    if not torchao_gathers_float8():
        return None
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

    from lightning_lowprec import FP8TorchAO

    mesh = init_device_mesh("cpu", (2,))

    def cut(model):
        parallelize_module(model, mesh, sequence_plan(Float8ColwiseParallel, Float8RowwiseParallel))

    def cut_for_evaluation(model):
        cut(model)
        model.eval()

    def refused(prepare=cut, **options):
        try:
            one_step(FP8TorchAO(emulate=True, **options), prepare=prepare)
        except RuntimeError as error:
            return str(error)
        return "not refused"

    def of_torchao(model):
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, fqn: fqn != "lm_head")
        return model

    def with_groups():
        """Each first layer of a block in a group of its own, whose input is gathered once for all of its layers."""
        model = Net()
        for block in model.blocks:
            block.up = nn.Sequential(block.up)
        return model

    def cut_groups(model):
        plan = sequence_plan(Float8ColwiseParallel, Float8RowwiseParallel)
        for i in range(2):
            plan[f"blocks.{i}.up"] = PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan[f"blocks.{i}.up.0"] = Float8ColwiseParallel()
        parallelize_module(model, mesh, plan)

    with gloo_takes_float8():
        found = {
            "ours": one_step("tensorwise", prepare=cut),
            "torchao's": one_step("bf16", of_torchao(Net()), prepare=cut),
            "ours, prepared": one_step("tensorwise", with_groups(), prepare=cut_groups),
            "torchao's, prepared": one_step("bf16", of_torchao(with_groups()), prepare=cut_groups),
            "rowwise": refused(recipe="rowwise"),
            "evaluation in bf16": refused(cut_for_evaluation, fp8_eval=False),
        }
        found["saved codes"] = refused(saved_inputs="codes")
    return found


# ---- context parallelism


def gathered(part, group, dim):
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


class Gathered(torch.autograd.Function):
    """Tokens of all ranks, (batch, heads, tokens, features)."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return gathered(part.contiguous(), group, 2)

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


class Attention(nn.Module):
    """Causal attention that gathers keys, values and positions if it has a process group."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.group = None

    def forward(self, x, positions):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (2, 32)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        everywhere = positions
        if self.group is not None:
            k, v = (Gathered.apply(t, self.group) for t in (k, v))
            everywhere = gathered(positions, self.group, 0)
        scores = (q @ k.transpose(2, 3)).float() / 32**0.5
        scores = scores.masked_fill(everywhere[None, :] > positions[:, None], -torch.inf)
        return x + self.o((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Sequences(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.lm_head = nn.Linear(64, 32)
        for block in self.blocks:
            block.group = group

    def forward(self, x, positions):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, positions)
        return self.lm_head(x)


def tokens():
    drawn = torch.randint(0, 32, (4, 33), generator=torch.Generator().manual_seed(3))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), torch.arange(32)


def contexts(precision):
    """The sequence cut by torch's ``context_parallel`` over the ranks of FSDP2, which reduces the gradients."""
    import lightning as L
    from torch.distributed.tensor.experimental import context_parallel

    from lightning_lowprec import FabricFSDP2Strategy

    strategy = FabricFSDP2Strategy(param_dtype=torch.float32)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=precisions()[precision]())
    fabric.launch()
    mesh = fabric.strategy.device_mesh["data_parallel"]
    net = Sequences(mesh.get_group())
    model = fabric.setup_module(net)
    x, y, positions = tokens()
    with context_parallel(mesh, buffers=[x, y, positions], buffer_seq_dims=[1, 1, 0]):
        shape, first = tuple(x.shape), positions.tolist()
        loss = F.cross_entropy(model(x, positions).float().flatten(0, 1), y.flatten())
        fabric.backward(loss)
    total = fabric.all_reduce(loss.detach(), reduce_op="mean").item()
    return total, gradients(net), shape, first


def contexts_of_one(precision):
    plugin, model = converted(precision, Sequences())
    x, y, positions = tokens()
    with plugin.forward_context():
        loss = F.cross_entropy(model(x, positions).float().flatten(0, 1), y.flatten())
    loss.backward()
    return loss.item(), gradients(model)


def torchs_ring_on_cpu():
    from torch.distributed.tensor.experimental import context_parallel

    q = torch.randn(1, 2, 16, 32)
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[q], buffer_seq_dims=[2]):
        try:
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
        except NotImplementedError as error:
            return str(error)
    return "it runs"


# ---- pipelines


class Stage(nn.Module):
    """One half of a Net, with its names; without a number the whole Net."""

    def __init__(self, number=None):
        super().__init__()
        net = Net()
        numbers = range(2) if number is None else [number]
        self.embedding = net.embedding if 0 in numbers else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): net.blocks[i] for i in numbers})
        self.lm_head = net.lm_head if 1 in numbers else nn.Identity()

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.lm_head(x)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def long_batch(data_rank=0):
    """Inputs and targets of 8 sequences: 4 micro-batches of 2."""
    tokens = torch.cat([batch(step, data_rank) for step in range(2)])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def set_up(precision, model, mesh, **options):
    """Convert a stage, and shard it if there is a mesh: the ranks that have the same stage."""
    from lightning_lowprec import parallelize

    if mesh is None:
        return converted(precision, model)
    plugin = precisions()[precision]()
    is_block = lambda fqn, module: fqn.startswith("blocks.") and fqn.count(".") == 1  # noqa: E731
    return plugin, parallelize(model, mesh, plugin, wrap=is_block, **options)


def pipeline(number, precision, schedule, mesh=None, *, group=None, data_rank=0, **options):
    from torch.distributed import pipelining

    plugin, model = set_up(precision, Stage(number), mesh, **options)
    stage = pipelining.PipelineStage(model, number, 2, CPU, group=group)
    runs = getattr(pipelining, schedule)(stage, n_microbatches=BATCHES, loss_fn=cross_entropy)
    (inputs, targets), losses = long_batch(data_rank), []
    with plugin.forward_context():
        runs.step(*([inputs] if number == 0 else []), **({"target": targets, "losses": losses} if number else {}))
    return [loss.item() for loss in losses], gradients(model)


def pipeline_of_one(precision, mesh=None, *, data_rank=0):
    plugin, model = set_up(precision, Stage(), mesh)
    losses = []
    for inputs, targets in zip(*(tensor.chunk(BATCHES) for tensor in long_batch(data_rank)), strict=True):
        with plugin.forward_context():
            losses.append(cross_entropy(model(inputs), targets))
        losses[-1].backward()
    found = {name: grad / BATCHES for name, grad in gradients(model).items()}
    return [loss.item() for loss in losses], found


def worker(rank):
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "data"))["data"]  # this rank, by itself
    pipelines = {
        (precision, schedule, sharded): (
            pipeline(rank, precision, schedule, mesh),
            pipeline_of_one(precision, mesh),
        )
        for precision in precisions()
        for schedule, sharded, mesh in (("Schedule1F1B", False, None), ("ScheduleGPipe", True, alone))
    }
    return {
        "sequence": {name: by_strategy(name) for name in ("tensorwise", "rowwise", "bf16")},
        "float8 activations": float8_activations(),
        "contexts": {name: contexts(name) for name in ("tensorwise", "rowwise", "bf16")},
        "ring": torchs_ring_on_cpu(),
        "pipelines": pipelines,
        "backend": dist.get_backend(),
    }
