"""Stacked experts on CUDA: which grouped products run, on how many bytes, and that nothing waits for the device."""

import lightning as L
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from benchmarks.ledger.recorder import recording
from lightning_lowprec import FP8TorchAO, HalfMixed

GROUPED = "GemmUniversal"
"""Of the name of CUTLASS's kernels for grouped products; other products here are cuBLAS's."""


def step_of(plugin, layers, experts=8):
    # without a cache transformers would ask the GPU for packed sequences, and this one answers by chance
    config = MixtralConfig(
        vocab_size=512, hidden_size=512, intermediate_size=896, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts,
    )  # fmt: skip
    with torch.device("cuda"):
        model = MixtralForCausalLM(config)
    fabric = L.Fabric(accelerator="cuda", devices=1, plugins=plugin)
    wrapped = fabric.setup(model)
    tokens = torch.zeros(2, 512, dtype=torch.long, device="cuda")

    def step():
        model.zero_grad()
        fabric.backward(wrapped(input_ids=tokens, labels=tokens).loss)

    return step


def counted(plugin, layers, **sizes):
    step = step_of(plugin, layers, **sizes)
    for _ in range(2):
        step()
    with recording() as log:
        step()
    return log


def grouped(log):
    names = [
        record.name for record in log.of("kernel") if GROUPED in record.name and "GroupProblemShape" in record.name
    ]
    return sum("float_e4m3" in name for name in names), sum("float_e4m3" not in name for name in names)


WAYS = {
    "bf16": (lambda: HalfMixed("auto"), 0, 6),
    "tensorwise": (lambda: FP8TorchAO(compile=False), 6, 0),
    "encoded at every product": (lambda: FP8TorchAO(compile=False, weight_codes="per_gemm"), 6, 0),
    "rowwise": (lambda: FP8TorchAO("rowwise", compile=False), 6, 0),
    "rowwise beside block": (lambda: FP8TorchAO({"*.experts.*": "rowwise", "*": "block"}, compile=False), 6, 0),
    "rowwise_with_gw_hp": (lambda: FP8TorchAO("rowwise_with_gw_hp", compile=False), 4, 2),
    "tensorwise, compiled": (FP8TorchAO, 6, 0),
    "forward in bf16": (lambda: FP8TorchAO(recipe={"*experts*": {"forward": "bf16"}}, compile=False), 4, 2),
    "experts in bf16": (lambda: FP8TorchAO(experts="bf16", compile=False), 0, 6),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_product_runs_where_it_should_and_nothing_waits(name):
    plugin, in_fp8, in_bf16 = WAYS[name]
    one, two = (counted(plugin(), layers) for layers in (1, 2))
    assert grouped(two) == (2 * in_fp8, 2 * in_bf16)
    assert grouped(one) == (in_fp8, in_bf16)
    assert two.waits() == []


def test_the_number_of_experts_changes_no_launch():
    few, many = (len(counted(FP8TorchAO(compile=False), 1, experts=count).of("kernel")) for count in (4, 16))
    assert few == many
