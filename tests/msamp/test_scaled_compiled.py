"""What MS-AMP computes through torch.compile has the bits of eager code: blocks, and the step of an optimizer."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_lowprec import MSAMP
from lightning_lowprec.msamp import step as msamp_step
from lightning_lowprec.msamp.adamw import ScaledAdamW
from lightning_lowprec.msamp.gradient import ScaledGradient
from tests.msamp.scaled_cases import OPTIONS, bits, run, same, scaled_params


def adam(params, **options):
    optimizer = ScaledAdamW(params, **options)
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    return optimizer


FORMS = {
    "adam": (adam, OPTIONS),
    "adamw": (ScaledAdamW, OPTIONS),
}


@pytest.fixture(autouse=True)
def aot_eager(monkeypatch):
    monkeypatch.setattr(msamp_step, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    msamp_step._compiled_by.cache_clear()


def trained(form, level, steps=5, **options):
    cls, own = FORMS[form]
    params = scaled_params(level)
    optimizer = cls(params, level=level, **own, **options)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = own["lr"] / (step + 1)  # as a scheduler
        run(optimizer, params, [step])
    return bits(params), [optimizer.state[p] for p in params]


# O1 has the passes of O2
@pytest.mark.slow_but("O1-adamw-False")
@pytest.mark.parametrize(
    ("level", "form", "stochastic"),
    [
        *((level, "adamw", True) for level in ("O2", "O3")),
        ("O2", "adam", False),
        *((level, "adamw", False) for level in ("O1", "O3")),
    ],
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(32, 5)
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained_blocks(level, sizes, compile, **options):
    """Losses, norms and an output in evaluation; two micro-batches a step, of ``sizes`` that need padding, clipped."""
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(level, compile=compile, **options))
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    found, kinds = [], set()
    for step, rows in enumerate(rows for rows in sizes for _ in range(2)):
        loss = model(torch.randn(rows, 32)).square().mean()
        fabric.backward(loss)
        found.append(loss.item())
        if step % 2:
            kinds |= {type(block.down.weight.grad) for block in model.blocks}
            found.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found.append(model(torch.ones(16, 32)).float().sum().item())
    return found, kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "sizes", "options", "kind"),
    [
        ("O2", (40, 24), {"base": "fp16", "stochastic_rounding": True}, ScaledGradient),
        ("O3", (40, 40), {"fp8_eval": False}, ScaledGradient),
        ("O2", (24, 24), {"grad_accumulation_dtype": torch.float32}, torch.Tensor),
    ],
)
def test_compiled_blocks_have_the_bits_of_eager_ones(level, sizes, options, kind):
    """Blocks of the first case are compiled again for the other size."""
    eager = trained_blocks(level, sizes, False, **options)
    torch._dynamo.utils.counters.clear()
    compiled = trained_blocks(level, sizes, {"backend": "aot_eager", "fullgraph": True}, **options)
    assert compiled == eager
    assert len(set(eager[0])) == len(eager[0]), "it learns"
    assert eager[1] == {kind}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1


def test_compile_on_request_needs_blocks():
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=MSAMP(compile=True))
    with pytest.raises(ValueError, match=r"`compile=True` found no blocks.*`compile=False`"):
        fabric.setup_module(nn.Sequential(nn.Linear(16, 16)))
