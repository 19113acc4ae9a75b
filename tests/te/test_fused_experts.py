"""Fused experts up to the kernel, which has no path on CPU; ``tests/te/test_fusion_routing.py`` has the rest."""

import copy
import pickle

import pytest
import torch

from lightning_lowprec.te.fusion import engines, fuse, unfuse
from tests.te.decoders import experts, linears, make, ragged

pytestmark = [pytest.mark.usefixtures("pretend_gpu"), pytest.mark.filterwarnings("default")]
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def fused():
    model = make("mixtral")
    fusion = fuse(model, may_convert=[*linears(model), *experts(model)], expert_alignment=32)
    assert fusion.summary() == "fused 4 of 4 places (2 norm+linear, 2 grouped experts)"
    assert {f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj", EXPERTS} <= fusion.handled
    return model


def test_one_gemm_for_each_expert(fused):
    up, down = engines(fused)[f"{EXPERTS}.up"], engines(fused)[f"{EXPERTS}.down"]
    assert (up.num_gemms, up.in_features, up.out_features) == (4, 64, 2 * 96)
    assert (down.num_gemms, down.in_features, down.out_features) == (4, 96, 64)


@pytest.mark.parametrize("remake", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_the_kernel_is_reached_with_every_weight_and_holds_none_after(fused, remake, monkeypatch):
    model = remake(fused)
    module, engine = model.get_submodule(EXPERTS), engines(model)[f"{EXPERTS}.up"]
    lent, given, forward = {}, [], engine.forward

    def seen(*args, **options):
        lent.update(engine._parameters)
        given.extend(args)
        return forward(*args, **options)

    monkeypatch.setattr(engine, "forward", seen)
    hidden = torch.randn(2, 64)
    with pytest.raises(RuntimeError, match="CUDA driver"):  # the real one, where it asks for a stream
        module(hidden, torch.tensor([[0, 1], [3, 0]]), torch.rand(2, 2))
    rows, splits = given
    assert splits == [32, 32, 0, 32]
    assert torch.equal(rows[[0, 1, 32, 64]], hidden[[0, 1, 0, 1]])
    assert rows.count_nonzero(dim=1).count_nonzero() == 4
    assert torch.equal(torch.stack([lent[f"weight{i}"] for i in range(4)]), module.gate_up_proj)
    assert all(value is None for value in engine._parameters.values())


def test_without_tokens_there_is_nothing_to_compute(fused):
    output = fused.get_submodule(EXPERTS)(torch.randn(0, 64), torch.zeros(0, 2, dtype=torch.long), torch.rand(0, 2))
    assert output.shape == (0, 64)


def test_keys_stay_and_unfused_it_is_what_it_was(fused):
    original = make("mixtral")
    assert list(fused.state_dict()) == list(original.state_dict())
    unfuse(fused)
    with torch.no_grad():
        assert torch.equal(fused(**ragged(2, 5)).logits, original(**ragged(2, 5)).logits)
