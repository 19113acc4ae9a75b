"""Stacked experts whose forward was replaced on the instance, as hooks of other libraries do."""

import copy
import pickle

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lightning_lowprec import FP8TorchAO, HalfMixed, plain, plan


class Layer(torch.nn.Module):
    """Experts beside a Linear, which converts whatever happens to the experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=4)
        config._experts_implementation = "grouped_mm"
        self.linear = torch.nn.Linear(32, 32)
        self.experts = MixtralExperts(config)
        for weight in self.experts.parameters():
            torch.nn.init.normal_(weight, std=0.1)

    def forward(self, x):
        index = torch.arange(len(x)).unsqueeze(1) % torch.tensor([2, 4])
        return self.experts(self.linear(x).float(), index, torch.full(index.shape, 0.5))


def replace_forward(experts):
    """Put a function around the forward, as accelerate's ``add_hook_to_module`` does."""
    old = experts.forward
    experts.forward = lambda *args: 2.0 * old(*args)


def weight_dtypes(monkeypatch):
    seen, multiply = [], F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda a, b, **kw: (seen.append(b.dtype), multiply(a, b, **kw))[1])
    return seen


def test_autocast_reaches_experts_below_a_replaced_forward(monkeypatch):
    model, x = Layer(), torch.randn(24, 32)
    replace_forward(model.experts)
    expected, config = model(x), model.experts.config
    wrapped = L.Fabric(plugins=HalfMixed("bf16"), accelerator="cpu").setup(model)
    seen = weight_dtypes(monkeypatch)
    torch.testing.assert_close(wrapped(x).float(), expected, rtol=0.05, atol=0.05)
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert config._experts_implementation == "grouped_mm", "other models may share the config"
    assert model.experts.config.hidden_size == 32
    plain(model)
    assert model.experts.config is config
    assert torch.equal(model(x), expected)
    assert seen[2:] == [torch.float32, torch.float32]


def test_fp8_keeps_experts_whose_forward_was_replaced():
    model = Layer()
    replace_forward(model.experts)
    reasons = {row.fqn: row.kept_because for row in plan(model, "fp8-rowwise").rows}
    replaced = "its forward is replaced on the instance"
    assert reasons == {"linear": None, "experts.gate_up_proj": replaced, "experts.down_proj": replaced}
    fabric = L.Fabric(plugins=FP8TorchAO(recipe="rowwise"), accelerator="cpu")
    assert fabric.setup(model)(torch.randn(24, 32)).isfinite().all()


def test_copies_of_a_config_that_leads_to_our_forward():
    model = Layer()
    replace_forward(model.experts)
    L.Fabric(plugins=HalfMixed("bf16"), accelerator="cpu").setup(model)
    for config in (copy.deepcopy(model.experts.config), pickle.loads(pickle.dumps(model.experts.config))):
        assert config._experts_implementation == "lightning_lowprec"
        assert config.own_config._experts_implementation == "grouped_mm"
        assert config.own_config is not model.experts.config.own_config
    plain = Layer()
    plain.experts.config._experts_implementation = "lightning_lowprec"
    with pytest.raises(ValueError, match=r"experts_implementation='lightning_lowprec'` is not valid.*'grouped_mm'"):
        plain(torch.randn(24, 32))
