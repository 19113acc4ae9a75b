"""Fused models on Transformer Engine's kernels: what they compute, in bf16 and FP8, against the models they were."""

import copy
from contextlib import nullcontext

import pytest
import torch

from lightning_lowprec.te.fusion import engines, fuse, unfuse
from tests.gpu.device import DEVICE, NO_VALUES, on_gpu_only
from tests.gpu.subjects import sqnr

te = pytest.importorskip("transformer_engine.pytorch", exc_type=ImportError)
pytest.importorskip("transformers")
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402

from tests.te.decoders import MAKERS, experts, linears, make, ragged  # noqa: E402

pytestmark = on_gpu_only
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
FP8_DB = (12.0, 45.0)
"""A few layers in FP8 against the same in bf16: worse is broken, better is not FP8."""


def on_device(name, dtype=torch.float32):
    if NO_VALUES and "mixtral" in name:
        pytest.skip("the router's values decide how many rows an expert gets")
    return make(name).to(DEVICE, dtype).train()


def fused_copy(model):
    fused = copy.deepcopy(model)
    fusion = fuse(fused, may_convert=[*linears(fused), *experts(fused)])
    assert fusion.fused
    return fused


def results(model, batch, recipe=None, autocast=False):
    """Logits, and the gradient of every Parameter."""
    batch = {name: value.to(DEVICE) for name, value in batch.items()}
    model.zero_grad()
    with (
        torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext(),
        te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()),
    ):
        output = model(**batch, labels=batch["input_ids"])
    output.loss.backward()
    grads = {fqn: p.grad.float().clone() for fqn, p in model.named_parameters() if p.grad is not None}
    return {"logits": output.logits.detach().float(), **grads}


def agreement(reference, found):
    assert reference.keys() == found.keys()
    return {
        what: sqnr(reference[what], found[what]) for what in reference if reference[what].abs().max() > 0 or NO_VALUES
    }


@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"mixtral"}))
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-true", "bf16-mixed"])
def test_bf16_is_as_near_to_float32_as_the_unfused_model(name, autocast, record_property):
    exact, batch = results(on_device(name), ragged(4, 12)), ragged(4, 12)
    model = on_device(name, torch.float32 if autocast else torch.bfloat16)
    unfused = agreement(exact, results(model, batch, autocast=autocast))
    fused = agreement(exact, results(fused_copy(model), batch, autocast=autocast))
    worst = min(fused[what] - unfused[what] for what in unfused)
    record_property("worst_difference_db", worst)
    assert worst > -6.0 or NO_VALUES, {
        what: (fused[what], unfused[what]) for what in unfused if fused[what] - unfused[what] < -6.0
    }


@pytest.mark.parametrize("name", ["llama", "llama-biases", "neox", "neox-tanh-serial", "mixtral-all"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_fp8_and_near_bf16(name, recipe, record_property):
    fused, batch = fused_copy(on_device(name)), ragged(4, 16)
    bf16 = results(fused, batch, autocast=True)
    for _ in range(3):  # delayed scaling learns its scales
        fp8 = results(fused, batch, recipe, autocast=True)
    found = agreement(bf16, fp8)
    record_property("logits_db", found["logits"])
    assert FP8_DB[0] < found["logits"] < FP8_DB[1] or NO_VALUES
    assert sum(found.values()) / len(found) > FP8_DB[0] or NO_VALUES, found


@pytest.mark.parametrize("name", ["llama", "mixtral-all"])
def test_every_number_of_tokens(name):
    fused, model = fused_copy(on_device(name)), on_device(name)
    for tokens in range(1, 41):
        batch = {key: value for key, value in ragged(1, tokens).items() if key == "input_ids"}
        found = agreement(results(model, batch, autocast=True), results(fused, batch, "current", autocast=True))
        assert found["logits"] > FP8_DB[0] or NO_VALUES, tokens


@pytest.mark.parametrize("trains", ["nothing", "model.layers.0.mlp.gate_proj.weight"])
def test_frozen_norms_behind_a_frozen_embedding(trains):
    model = on_device("llama").requires_grad_(False)
    if trains == "nothing":
        with torch.autocast("cuda", torch.bfloat16):
            assert not fused_copy(model)(input_ids=ragged(1, 5)["input_ids"].to(DEVICE)).logits.requires_grad
        return
    model.get_parameter(trains).requires_grad_()
    batch = ragged(2, 8)
    fused = results(fused_copy(model), batch, autocast=True)
    assert set(fused) == {"logits", trains}
    assert agreement(results(model, batch, autocast=True), fused)[trains] > 25 or NO_VALUES


def test_the_joined_weights_are_not_kept_for_the_backward(record_property):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    fuse(model, may_convert=linears(model))
    joined = sum(
        p.nbytes for fqn, p in model.named_parameters() if fqn.endswith(("up_proj.weight", "gate_proj.weight"))
    )
    batch = ragged(1, 16)["input_ids"].to(DEVICE)
    grown = []
    for _ in range(2):
        before = torch.cuda.memory_allocated(DEVICE)
        with torch.autocast("cuda", torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
            loss = model(input_ids=batch, labels=batch).loss
        grown.append(torch.cuda.memory_allocated(DEVICE) - before)
        loss.backward()
    record_property("bytes", {"grown": grown, "joined": joined})
    assert grown[1] < 1.6 * joined  # FP8 codes and transposes of all weights are as much, the joined copies 1.4 more


def test_checkpointing_gives_the_same_gradients():
    model, batch = on_device("llama"), ragged(4, 12)
    wanted = results(fused_copy(model), batch, "current", autocast=True)
    checkpointed = fused_copy(model)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = agreement(wanted, results(checkpointed, batch, "current", autocast=True))
    assert min(found.values()) > 30 or NO_VALUES, found


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_training_follows_the_unfused_model(recipe, record_property):
    model = on_device("mixtral")
    fused, losses = fused_copy(model), {}
    for name, one in (("unfused", model), ("fused", fused)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=3e-3)
        losses[name] = []
        for _ in range(20):
            batch = {key: value.to(DEVICE) for key, value in ragged(4, 16).items()}
            kind = recipe if one is fused else None
            with (
                torch.autocast("cuda", torch.bfloat16),
                te.autocast(enabled=kind is not None, recipe=kind and RECIPES[kind]()),
            ):
                loss = one(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    record_property("losses", losses)
    assert losses["fused"][-1] < 0.8 * losses["fused"][0] or NO_VALUES
    assert losses["fused"][-1] == pytest.approx(losses["unfused"][-1], abs=0.2 if recipe is None else 0.4) or NO_VALUES


def test_copies_after_training_and_going_back():
    fused, batch = fused_copy(on_device("llama")), ragged(4, 16)
    results(fused, batch, "delayed", autocast=True)
    other = copy.deepcopy(fused)
    wanted = results(fused, batch, "delayed", autocast=True)
    assert agreement(wanted, results(other, batch, "delayed", autocast=True))["logits"] > 30 or NO_VALUES
    assert all(engine.fp8_meta["scaling_fwd"].scale.is_cuda for engine in engines(other).values())
    unfuse(fused)
    exact = results(on_device("llama"), batch)
    assert agreement(exact, results(fused, batch))["logits"] > 100 or NO_VALUES
