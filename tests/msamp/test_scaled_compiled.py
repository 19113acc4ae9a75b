"""A compiled step of ScaledAdamW has the bits of an eager one."""

import pytest
import torch

from lightning_lowprec.msamp import step as msamp_step
from lightning_lowprec.msamp.adamw import ScaledAdamW
from tests.msamp.scaled_cases import OPTIONS, bits, run, same, scaled_params


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch):
    monkeypatch.setattr(msamp_step, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    msamp_step._compiled_by.cache_clear()


def trained(level, steps=5, **options):
    params = scaled_params(level)
    optimizer = ScaledAdamW(params, level=level, **OPTIONS, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = OPTIONS["lr"] / (step + 1)  # as a scheduler
        run(optimizer, params, [step])
    return bits(params), [optimizer.state[p] for p in params]


# O1 has the passes of O2
@pytest.mark.parametrize(("level", "stochastic"), [("O2", False), ("O2", True), ("O3", True)])
def test_a_compiled_step_has_the_bits_of_an_eager_one(level, stochastic):
    torch._dynamo.utils.counters.clear()
    weights, states = trained(level, stochastic_rounding=stochastic)
    assert not torch._dynamo.utils.counters["stats"]
    compiled, compiled_states = trained(level, stochastic_rounding=stochastic, compile=True)
    passes = 2 + (level == "O3") * (1 + stochastic)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * passes, "any size, and one element"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert same(weights, compiled)
    for a, b in zip(states, compiled_states, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == b[key] if key == "step" else torch.equal(value.float(), b[key].float()), key
