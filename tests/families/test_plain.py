"""`plain(model)` of transformers' models: heads, losses, stacked experts, Conv1Ds and configs are those of before."""

import lightning as L
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from lightning_lowprec import MSAMP, FP8TorchAO, HalfMixed, plain

pytestmark = pytest.mark.slow

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 32}
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def gpt2():
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, **ends))


CASES = {
    "llama-fp8-head": (llama, lambda: FP8TorchAO(head="fp8")),
    "llama-msamp-o3": (llama, lambda: MSAMP("O3", head="chunked")),
    "mixtral-experts": (mixtral, FP8TorchAO),
    "mixtral-remainder": (mixtral, lambda: HalfMixed("bf16", master_weights="remainder", head="chunked")),
    "gpt2-conv1d": (gpt2, FP8TorchAO),
    "gpt2-msamp-o2": (gpt2, lambda: MSAMP("O2")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers(case, tmp_path):
    make, plugin = CASES[case]
    torch.manual_seed(0)
    model = make()
    before = [(type(m), vars(m).keys(), getattr(m, "config", None)) for m in model.modules()]
    implementation, loss = model.config._experts_implementation, model.loss_function
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin())
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    fabric.backward(wrapped(input_ids=IDS, labels=IDS).loss)
    optimizer.step()
    model.save_pretrained(tmp_path / "in-fp8")
    assert plain(wrapped) is model
    assert [(type(m), vars(m).keys(), getattr(m, "config", None)) for m in model.modules()] == before
    assert model.config._experts_implementation == implementation
    assert model.loss_function is loss
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (make is not mixtral)
    model.save_pretrained(tmp_path / "plain")
    loaded = {name: type(model).from_pretrained(tmp_path / name).state_dict() for name in ("plain", "in-fp8")}
    state = model.state_dict()
    assert all(torch.equal(value, loaded["plain"][fqn]) for fqn, value in state.items())
    if "remainder" in case:  # the model's own weights are bf16; plain ones are the masters
        for fqn, value in state.items():
            torch.testing.assert_close(loaded["in-fp8"][fqn].float(), value, rtol=2**-8, atol=0)
    elif "o3" not in case:  # at O3 the plain weights are the fp16 masters
        assert all(torch.equal(value, loaded["in-fp8"][fqn]) for fqn, value in state.items())
    program = torch.export.export(model.eval(), (), {"input_ids": IDS, "use_cache": False})
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
        torch.testing.assert_close(program.module()(input_ids=IDS, use_cache=False).logits, expected)
