"""Two ranks train one step, and return counts of what they send."""

import itertools
from collections import Counter

import lightning as L
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec import FabricFSDP2Strategy, FSDP2Strategy
from lightning_lowprec.fsdp2 import strategy as sharding
from lightning_lowprec.tools.demo import ByteGPT
from tests.toys import QUIET

PRECISIONS = ("fp8-hybrid", "fp8-rowwise-gw-hp", "bf16-mixed", "32-true")
RESHARD = (None, True, False)
QUIET = {**QUIET, "use_distributed_sampler": False}


def model():
    torch.manual_seed(0)
    return ByteGPT(depth=2, width=32, heads=2, block_size=16)


def batch():
    return tuple(torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(2))


class AllReduces(TorchDispatchMode):
    """Counts the all-reduces that go through torch's dispatcher: those of DTensors, which the scales are."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the DTensor's own dispatch comes next, and what it calls comes back here
        if "_c10d_functional.all_reduce" in str(func):
            self.bytes[str(args[0].dtype)] += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class CountedScatter(DefaultReduceScatter):
    """The reduce-scatters of one FSDP2 group: the bytes that this rank put in."""

    def __init__(self):
        self.sent = 0

    def __call__(self, output_tensor, input_tensor, *args, **kwargs):
        self.sent += input_tensor.numel() * input_tensor.element_size()
        return super().__call__(output_tensor, input_tensor, *args, **kwargs)


class CountScatters(L.Callback):
    def on_train_start(self, trainer, net):
        self.scatters = count_scatters(net)


def count_scatters(net):
    scatters = []
    for group in [module for module in net.modules() if isinstance(module, FSDPModule)]:
        scatters.append(CountedScatter())
        group.set_custom_reduce_scatter(scatters[-1])
    return scatters


def counted(net, scales, scatters):
    gathers = sharding._sharded[net].sharded.traffic.gathers
    return {
        "gathered": {f: g.sent.total() for f, g in gathers.items()},
        "calls": {f: g.calls.total() for f, g in gathers.items()},
        "scattered": sum(scatter.sent for scatter in scatters),
        "scales": dict(scales.bytes),
    }


def by_fabric(precision, **options):
    fabric = L.Fabric(accelerator="cpu", devices=2, precision=precision, strategy=FabricFSDP2Strategy(**options))
    fabric.launch()
    net = model()
    wrapped, optimizer = fabric.setup(net, net.configure_optimizers()["optimizer"])
    scatters = count_scatters(net)
    scales = sharding._sharded[net].sharded.scales
    mode = AllReduces()
    if scales is not None:
        with mode:
            scales.refresh()
    x, y = batch()
    fabric.backward(torch.nn.functional.cross_entropy(wrapped(x).float().flatten(0, 1), y.flatten()))
    optimizer.step()
    assert scales is None or scales.reductions == 1
    return counted(net, mode, scatters)


def by_trainer(precision, **options):
    net = model()
    counting, strategy = CountScatters(), FSDP2Strategy(**options)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, precision=precision, strategy=strategy, callbacks=counting, max_steps=1, **QUIET
    )
    trainer.fit(net, torch.utils.data.DataLoader([batch()], batch_size=None))
    return counted(net, AllReduces(), counting.scatters)


def copies():
    """Two copies of one shard each: what goes between them is `torch.distributed.all_reduce`."""
    original, sent = torch.distributed.all_reduce, []

    def counting(tensor, *args, **kwargs):
        sent.append((str(tensor.dtype), tensor.numel() * tensor.element_size()))
        return original(tensor, *args, **kwargs)

    net = model()
    fabric = L.Fabric(accelerator="cpu", devices=2, precision="bf16-mixed", strategy=FabricFSDP2Strategy(replicate=2))
    fabric.launch()
    wrapped, _ = fabric.setup(net, net.configure_optimizers()["optimizer"])
    torch.distributed.all_reduce = counting
    try:
        x, y = batch()
        fabric.backward(torch.nn.functional.cross_entropy(wrapped(x).float().flatten(0, 1), y.flatten()))
    finally:
        torch.distributed.all_reduce = original
    return {"all_reduced": sum(size for _, size in sent), "dtypes": sorted({dtype for dtype, _ in sent})}


def worker(rank):
    seen = {}
    for precision, reshard in itertools.product(PRECISIONS, RESHARD):
        seen[f"fabric {precision} {reshard}"] = by_fabric(precision, reshard_after_forward=reshard)
        seen[f"trainer {precision} {reshard}"] = by_trainer(precision, reshard_after_forward=reshard)
    seen["bf16 reduce"] = by_fabric("bf16-mixed", reduce_dtype=torch.bfloat16)
    seen["copies"] = copies()
    return seen
