"""One case of ``worlds``: rank 0 of a world of GPUs trains some steps on the null GPU, by Fabric and our strategy.

The other ranks do not exist: torch's fake process group takes their place. All else is what a user runs: the precision
by its name, ``FSDP2Strategy``, a model that is built on the meta device, fused AdamW.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.ledger.collectives import Counts, counted
from benchmarks.rivals.models import SHAPES, Llama, Shape, rotary
from lightning_lowprec import FabricFSDP2Strategy
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.names import TABLE
from lightning_lowprec.tools.planning.costs import all_reduce, footprints, per_rank

LLAMA3: Mapping[str, Shape] = {
    "8b": replace(SHAPES["8b"], layers=32),
    "70b": replace(SHAPES["8b"], name="70b", layers=80, hidden=8192, ffn=28672, heads=64),
    "405b": replace(SHAPES["8b"], name="405b", layers=126, hidden=16384, ffn=53248, heads=128),
}
NO_META = ("msamp-o3",)
"""Precisions that refuse a model on the meta device."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a world and a precision."""

    shape: str
    world: int
    precision: str
    layers: int = 0
    """0: all."""
    copies: int = 1
    """Copies of the sharded model (HSDP)."""
    tensor: int = 1
    """Ranks of one tensor-parallel group."""
    tokens: int = 4096
    """Tokens of this rank's only sequence."""

    @property
    def shards(self) -> int:
        return self.world // self.copies // self.tensor

    @property
    def size(self) -> Shape:
        full = LLAMA3[self.shape]
        return replace(full, layers=self.layers or full.layers, sequence=self.tokens)

    def __str__(self) -> str:
        how = f"{self.shards} x {self.copies}" + (f" x {self.tensor} tensor parallel" if self.tensor > 1 else "")
        return f"{self.shape} ({self.size.layers} layers) on {self.world} ({how}), {self.precision}"


class Model(Llama):
    """The decoder, which can be built on the meta device."""

    def reset_parameters(self) -> None:
        """Fill the only tensor that no submodule owns."""
        self.turn.copy_(rotary(self.shape.sequence, self.shape.head_dim))


def run(case: Case) -> dict[str, Any]:
    """Train three steps of ``case`` and return what was counted, beside what formulas and plan promise."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    for _ in range(2):  # tensors of an earlier case in this process; one round frees what held the others
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        bare = Model(case.size)
    row: dict[str, Any] = {**asdict(case), "layers": case.size.layers, "promised": promised(case, bare)}
    try:
        row |= train(case, bare)
        row["outcome"] = "ok"
    except torch.OutOfMemoryError as error:
        row |= {"outcome": "out of memory", "note": str(error).split(". GPU")[0]}
    except ValueError as error:
        row |= {"outcome": "refused", "note": str(error)}
    return row


# ---- promises


def promised(case: Case, model: nn.Module) -> dict[str, Any]:
    """Return the bytes that ``lowprec plan --shards`` counts, with those between copies; of tensor parallelism none."""
    if case.tensor > 1:
        return {}
    name = TABLE.get(case.precision)
    converts = name is not None and name.plugin.backend is not None
    plan = make_plan(model, None, name.plan_request() if name is not None and converts else None)
    sizes = footprints(model, plan, case.precision)
    if not converts:
        sizes = [row for row in sizes[:-1] if row.precision == case.precision]
    ranks = per_rank(model, plan, sizes, shards=case.shards)
    rank = next((rank for rank in ranks if rank.precision == case.precision), None)
    if rank is None:
        return {}
    between_copies = all_reduce(rank.sent.reduce_scatter / max(case.shards - 1, 1), case.copies)
    return {"state": rank.state, "in_flight": rank.in_flight, **asdict(rank.sent), "all_reduce": between_copies}


def tensor_plan(shape: Shape) -> dict[str, Any]:
    """Return a plan for ``parallelize_module``: every block's first layers by columns, its last ones by rows."""
    columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {}
    for i in range(shape.layers):
        plan |= {f"layers.{i}.{name}": ColwiseParallel() for name in columns}
        plan |= {f"layers.{i}.{name}": RowwiseParallel() for name in ("attention.o_proj", "mlp.down_proj")}
    return plan


# ---- what runs


class OneOfMany(LightningEnvironment):
    """Rank 0 of a world, one GPU per machine as far as Lightning is concerned."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world

    def world_size(self) -> int:
        return self._world

    def global_rank(self) -> int:
        return 0


def fabric_for(case: Case) -> L.Fabric:
    """Return Fabric in the middle of the world, with a fake process group; blocks are not compiled."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world)
    options: dict[str, Any] = {"activation_checkpointing": True, "replicate": case.copies}
    if case.tensor > 1:
        options |= {"tensor_parallel": tensor_plan(case.size), "tensor_parallel_size": case.tensor}
    strategy = FabricFSDP2Strategy(cluster_environment=OneOfMany(case.world), **options)
    name, chosen = TABLE.get(case.precision), {"precision": case.precision}
    if name is not None and "compile" in inspect.signature(name.plugin).parameters:
        chosen = {"plugins": name.plugin(**{**name.options, "compile": False})}
    fabric = L.Fabric(accelerator="cuda", devices=1, num_nodes=case.world, strategy=strategy, **chosen)  # type: ignore[arg-type]
    fabric.launch()
    return fabric


def train(case: Case, model: nn.Module) -> dict[str, Any]:
    """Set up, and train three steps: the first one makes the moments, the second one is measured, the third counted."""
    gc.collect()
    torch.cuda.empty_cache()
    before = _held()  # of whatever ran in this process before
    fabric = fabric_for(case)
    if case.precision in NO_META:
        with fabric.device:
            model = Model(case.size)
    module = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True))
    memory: dict[str, int] = {"setup_peak": torch.cuda.max_memory_allocated()}
    tokens = torch.zeros(1, case.tokens, dtype=torch.int64, device=fabric.device)

    def forward_and_backward() -> None:
        fabric.backward(module(tokens, tokens))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    forward_and_backward()
    step()
    torch.cuda.reset_peak_memory_stats()
    forward_and_backward()
    memory |= {"backward_peak": torch.cuda.max_memory_allocated(), "state": _held()}
    torch.cuda.reset_peak_memory_stats()
    step()
    memory |= {"optimizer_peak": torch.cuda.max_memory_allocated(), "at_rest": _held()}
    memory = {name: held - before for name, held in memory.items()}
    memory["reserved"] = torch.cuda.max_memory_reserved()
    with counted() as counts:
        forward_and_backward()
        step()
    return {"memory": memory, **_counts(case, counts)}


def _held() -> int:
    """Return the bytes that are allocated, without cuBLAS's workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def _counts(case: Case, counts: Counts) -> dict[str, Any]:
    reduced = [c.stage for c in counts.collectives if c.kind == "all_reduce"]
    outside = ("else",) if case.precision.startswith("msamp") else ()  # reduces its scales in the optimizer's step
    wire = {
        "all_gather": counts.sent("all_gather"),
        "reduce_scatter": counts.sent("reduce_scatter"),
        "all_reduce": counts.sent("all_reduce", "reduce"),
        "scales": counts.sent("all_reduce", "scales", "copy in", *outside),
        "other": 0 if outside else counts.sent("all_reduce", "else"),
    }
    return {
        "wire": wire,
        "dtypes": {kind: counts.dtypes(kind) for kind in ("all_gather", "reduce_scatter")},
        "collectives": {
            "all_gather": sum(c.kind == "all_gather" for c in counts.collectives),
            "reduce_scatter": sum(c.kind == "reduce_scatter" for c in counts.collectives),
            "all_reduce": {stage: reduced.count(stage) for stage in sorted(set(reduced))},
        },
        "stages": {
            name: {"calls": counts.calls[name], "kernels": counts.kernels[name], "bytes": counts.moved[name]}
            | {"waits": counts.waits[name]}
            for name in ("scales", "copy in", "copy out", "reduce")
        },
    }
