"""Stacked experts under FSDP2: float8 all-gather changes nothing but the bytes; two gloo ranks."""

import pytest
import torch

from tests.fsdp2.gathers import scales_of
from tests.fsdp2.models import full
from tests.fsdp2.ranks import run

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
STEPS = 5
WAYS = {
    "float8 gathered": ({}, True),
    "float8 gathered, encoded at every gather": ({"weight_codes": "per_gemm"}, True),
    "float32 gathered": ({}, False),
    "rowwise": ({"recipe": "rowwise"}, False),
    "block": ({"recipe": "block", "hidden_size": 128}, True),
    "block, sides that 128 does not divide": ({"recipe": "block"}, True),
}


def mixture(hidden_size=32):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def converted(options):
    import lightning_lowprec

    options = dict(options)
    model = mixture(options.pop("hidden_size", 32))
    plugin = lightning_lowprec.FP8TorchAO(emulate=True, **options)
    plugin.bind_device(torch.device("cpu"))
    plugin.convert_module(model)
    return model, plugin


def train(model, plugin, ranks, refresh=lambda: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        refresh()
        for rank in ranks:
            tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))
            (model(input_ids=tokens, labels=tokens).loss / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full(model)


def runs(rank):
    from torch.distributed.device_mesh import init_device_mesh

    from lightning_lowprec.fsdp2.options import ShardOptions
    from lightning_lowprec.fsdp2.shard import shard
    from lightning_lowprec.private.torch import local_tensor

    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, (options, gathers) in WAYS.items():
        model, plugin = converted(options)
        shard(model, mesh, ShardOptions(), device=torch.device("cpu"), param_dtype=None, fp8_all_gather=gathers)
        weights = train(model, plugin, [rank], scales_of(model).refresh if gathers else lambda: None)
        shards = [local_tensor(weight) for weight in scales_of(model).weights] if gathers else []
        expected = train(*converted(options), [0, 1])  # here, with as many threads
        found[name] = weights, expected, len(shards), sum(own._kept is not None for own in shards)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(runs, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", WAYS)
def test_two_ranks_train_as_one_process(name, trained):
    (first, expected, *_), (second, *_) = (result[name] for result in trained)
    assert all(torch.equal(first[key], value) for key, value in second.items())
    for key, value in expected.items():
        assert torch.equal(first[key], value), key


def test_the_weights_of_experts_are_gathered_as_float8(trained):
    """Four Linears of attention, and two Parameters of experts."""
    gathered = {name: found[2:] for name, found in trained[0].items()}
    assert gathered["float8 gathered"] == (6, 6)
    assert gathered["float8 gathered, encoded at every gather"] == (6, 0)
    assert gathered["float32 gathered"] == (0, 0)
    assert gathered["block"] == (6, 6)
    assert gathered["block, sides that 128 does not divide"] == (4, 4)


def test_experts_that_do_not_divide_say_so():
    from lightning_lowprec.fsdp2.fp8_gather import check_even

    model, _ = converted({})
    with pytest.raises(ValueError, match=r"experts.gate_up_proj' has 4 experts, which do not divide into 3 equal"):
        check_even(model.model.layers[0].mlp, 3)
