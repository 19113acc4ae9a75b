"""The wrapper is free: no more operations, collectives and Python calls than the same torchao code by hand."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import hook_overhead
from benchmarks.hook_overhead import DEPTH, measure
from lightning_lowprec import FabricFSDP2Strategy


class Ops(TorchDispatchMode):
    """Count aten operations by name; of torchao's tensors only the outermost."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def leave_no_process_group():
    """DDP runs in this process; later tests must not find themselves distributed."""
    environment = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.filterwarnings("ignore:.*(many workers|`training_step` returned|isinstance.treespec).*")
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_step_makes_the_calls_of_the_code_by_hand(strategy):
    result = measure(strategy)
    for where in ("trainer", "fabric"):
        ours, by_hand = result[where]["ours"], result[where]["by_hand"]
        assert {name for name, count in ours.aten.items() if count > by_hand.aten.get(name, 0)} == set()
        assert ours.aten["aten::mm"] == 3 * DEPTH - 1, "the first layer has no gradient of its input"
        assert ours.collectives == by_hand.collectives
        assert sum(ours.collectives.values()) == (0 if strategy == "auto" else 2), "one all-reduce, seen twice"
        assert 10 * DEPTH < ours.calls <= by_hand.calls


def sharded_by_hand():
    """One training step under FSDP2 as a torchao user writes it; every layer is gathered by itself."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

    model = hook_overhead.Model(by_hand=True)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True))
    mesh, dtypes = init_device_mesh("cpu", (1,)), {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False))
    optimizer = model.configure_optimizers()
    batch = torch.randn(hook_overhead.TOKENS, hook_overhead.WIDTH)

    def step():
        precompute_float8_dynamic_scale_for_fsdp(model)
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_fsdp2_by_hand_computes_what_our_strategy_computes():
    """One step sends the same, and writes no more."""
    ours = hook_overhead.fabric_step(False, FabricFSDP2Strategy(wrap=[nn.Linear]))
    loops = {"ours": ours, "by hand": sharded_by_hand()}
    counts, writes = {}, {}
    for name, loop in loops.items():
        loop()  # lazy set-up
        loop()
        with Ops() as ops:
            loop()
        counts[name], writes[name] = ops.counts, Counter(hook_overhead.count(loop).aten)
    assert counts["by hand"]["aten.mm.default"] >= 3 * DEPTH, "the FP8 GEMMs were not counted"
    assert counts["by hand"]["fsdp.chunk_cat.default"] == DEPTH, "gradients of every layer by themselves"
    sent = [{k: n for k, n in c.items() if "c10d" in k or k.startswith("fsdp.")} for c in counts.values()]
    assert sent[0] == sent[1]
    assert not writes["ours"] - writes["by hand"]
    assert writes["ours"]["aten::mm"] >= 3 * DEPTH - 1
