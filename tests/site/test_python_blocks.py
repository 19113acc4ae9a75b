"""Every Python block on the README and the site runs; those that need other machines are checked by signatures."""

import ast
import inspect
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_lowprec
from lightning_lowprec import FP8TorchAO
from lightning_lowprec.callbacks import NumericsMonitor
from lightning_lowprec.conversion import backends
from lightning_lowprec.tools.demo import ByteGPT, StdlibText
from tests.site.pages import ROOT, Block, blocks

pytestmark = pytest.mark.slow

OURS: dict[str, Any] = {name: getattr(lightning_lowprec, name) for name in lightning_lowprec.__all__}
OURS["NumericsMonitor"] = NumericsMonitor

READ = {
    "deepspeed-1": "tests/deepspeed/parts.py",
    "deepspeed-2": "tests/deepspeed/parts.py",
    "parallelism-2": "tests/fsdp2/test_expert_parallel.py",
    "parallelism-3": "tests/ledger/test_context_parallel.py",
    "parallelism-4": "tests/fsdp2/test_parallelisms.py",
    "serving-1": "tests/tools/test_export_serving.py",
    "serving-2": "tests/serving/test_formats.py",
    "torchao-3": "tests/torchao/test_frozen_codes.py",
    "transformer-engine-1": "tests/te/test_te_recipes.py",
}
"""Blocks that need several processes, DeepSpeed, a checkpoint, Transformer Engine or much time, each with the test that
runs the same calls. The signatures of our own calls in them are checked."""


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Pair()
        self.embedding = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embedding(x))


def surroundings(name: str) -> dict[str, Any]:
    """Return what a block may use without an import: Lightning, our public names, and the reader's model and data."""
    model = Model()
    return {
        "L": L,
        "lightning_lowprec": lightning_lowprec,
        "torch": torch,
        "Trainer": L.Trainer,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "batches": [torch.zeros(4, 32)] * 2,
        "loss_of": torch.sum,
        "layers": 2,
        "rank": 0,
        "build_model": Model,
        "Block": Pair,
        **OURS,
        **EXTRA.get(name, dict)(),
    }


def _in_fabric() -> dict[str, Any]:
    fabric = L.Fabric(accelerator="cpu", plugins=FP8TorchAO(keep=["embedding"]))
    model = Model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    return {"fabric": fabric, "model": model, "optimizer": optimizer}


def _with_ddp() -> dict[str, Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return {"ddp": nn.parallel.DistributedDataParallel(Model())}


def _with_a_head() -> dict[str, Any]:
    owner = SimpleNamespace(lm_head=nn.Linear(32, 64, bias=False))
    return {"self": owner, "hidden": torch.zeros(8, 32), "targets": torch.zeros(8, dtype=torch.long)}


def _to_train() -> dict[str, Any]:
    return {"ByteGPT": ByteGPT, "StdlibText": StdlibText, "__name__": "docs_block"}


EXTRA: dict[str, Callable[[], dict[str, Any]]] = {
    "architecture-1": _to_train,
    "checkpoints-2": _in_fabric,
    "checkpoints-3": _in_fabric,
    "memory-2": _with_a_head,
    "fsdp2-3": _with_ddp,
    "compare-2": _in_fabric,
}
"""What single blocks find beside that."""


def check_read(code: str) -> int:
    """Bind the arguments of every call of ours to its signature, and return the number of these calls."""
    known, calls = dict(OURS), 0
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_lowprec"):
            known |= {alias.name: getattr(import_module(str(node.module)), alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and (ours := _ours(node.func, known)) is not None:
            names = [word.arg for word in node.keywords if word.arg is not None]
            inspect.signature(ours).bind(*node.args, **dict.fromkeys(names))
            calls += 1
    return calls


def _ours(function: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(function, ast.Name):
        return known.get(function.id)
    owners = {"lightning_lowprec": lightning_lowprec, "L": L}
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id in owners:
        return getattr(owners[function.value.id], function.attr)
    return None


# ---- the tests

PYTHON = blocks("python")
RUN = [block for block in PYTHON if block.name not in READ]


@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`:UserWarning")
@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_the_block_runs(block: Block, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before = backends.registered()
    try:
        exec(compile(shortened(block.code), block.name, "exec"), surroundings(block.name))
    finally:
        for backend in backends.registered():
            if backend not in before:
                backends.unregister(backend.name)


def shortened(code: str) -> str:
    short = "limit_val_batches=1, logger=False, enable_checkpointing=False"
    code = code.replace("limit_train_batches=100", f"limit_train_batches=2, {short}")
    return code.replace("max_steps=100", f"max_steps=2, {short}")


@pytest.mark.parametrize("name", READ)
def test_a_block_that_needs_another_machine_has_valid_calls(name: str):
    (block,) = [block for block in PYTHON if block.name == name]
    check_read(block.code)
    assert (ROOT / READ[name]).is_file()
