"""The update of ScaledAdamW and ScaledSGD through torch.compile: the bits of the eager one, and no graph per step."""

import pytest
import torch

from lightning_lowprec.msamp import fused_step
from lightning_lowprec.msamp.adamw_sgd import ScaledAdamW, ScaledSGD
from tests.msamp.scaled_cases import OPTIONS, bits, every_level, run, same, scaled_params

FORMS = {
    "adamw": (ScaledAdamW, OPTIONS),
    "sgd": (ScaledSGD, {"lr": 0.1}),
    "momentum": (ScaledSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
}


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch):
    monkeypatch.setattr(fused_step, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    fused_step._compiled.cache_clear()


def trained(form, level, steps=5, **options):
    cls, own = FORMS[form]
    params = scaled_params(level)
    optimizer = cls(params, level=level, **own, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = own["lr"] / (step + 1)  # as a scheduler
        run(optimizer, params, [step])
    return bits(params), [optimizer.state[p] for p in params]


@every_level
@pytest.mark.parametrize(
    ("form", "stochastic"), [("adamw", False), ("adamw", True), ("sgd", False), ("momentum", False)]
)
def test_a_compiled_step_has_the_bits_of_an_eager_one(level, form, stochastic):
    torch._dynamo.utils.counters.clear()
    weights, states = trained(form, level, stochastic_rounding=stochastic)
    assert not torch._dynamo.utils.counters["stats"]
    compiled, compiled_states = trained(form, level, stochastic_rounding=stochastic, compile=True)
    passes = 2 + (level == "O3") * (1 + stochastic)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * passes, "any size, and one element"
    assert not torch._dynamo.utils.counters["graph_break"]
    assert same(weights, compiled)
    for a, b in zip(states, compiled_states, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == b[key] if key == "step" else torch.equal(value.float(), b[key].float()), key
