"""PEFT's LoRA over a base in FP8 alone: transformers' Llama, adapters that train, what is saved and what cannot be."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import LlamaForCausalLM

from lightning_lowprec import FP8TE
from lightning_lowprec.te.fp8_weight import FrozenWeight
from lightning_lowprec.te.layer import convert_linears, store_frozen_in_fp8, te_linears
from tests.quality import sqnr
from tests.te.reference import losses_of
from tests.te.subjects import LLAMA, fabric_for
from tests.te.test_te_frozen import DECIBELS

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's use
TOKENS = torch.arange(64).reshape(4, 16)


def adapted():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
    return get_peft_model(LlamaForCausalLM(LLAMA), config)


@pytest.fixture
def in_fp8(pretend_gpu):
    model = adapted()
    fabric_for(FP8TE("current", fp8_params=True)).setup(model)
    return model


def test_the_base_takes_a_byte_and_adapters_train(in_fp8):
    frozen = {name for name, p in in_fp8.named_parameters() if isinstance(p, FrozenWeight)}
    linears = LLAMA.num_hidden_layers * 7
    assert len(frozen) == linears == len(te_linears(in_fp8))
    assert not any("lora_" in name or "embed" in name or "lm_head" in name for name in frozen)
    trained = {name for name, p in in_fp8.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)


def test_adapters_are_saved_and_loaded(in_fp8, tmp_path):
    for name, p in in_fp8.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(p)
    in_fp8.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    plain = adapted()
    set_peft_model_state_dict(plain, get_peft_model_state_dict(in_fp8))
    assert all(bool((p == 1).all()) for name, p in plain.named_parameters() if "lora_B" in name)


def test_a_merge(in_fp8):
    """In place it would be swallowed in part; into a new weight it is rounded once."""
    for name, p in in_fp8.named_parameters():
        if "lora_B" in name:
            nn.init.ones_(p)
    with pytest.raises(RuntimeError, match=r"PEFT's merge with `safe_merge=True`"):
        in_fp8.merge_adapter()
    layer = in_fp8.base_model.model.model.layers[0].self_attn.q_proj
    merged = layer.base_layer.weight.values() + layer.get_delta_weight("default").detach()
    layer.merge(safe_merge=True)
    assert isinstance(layer.base_layer.weight, FrozenWeight)
    assert DECIBELS - 1 < sqnr(merged, layer.base_layer.weight.values()) < 40


def losses(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return losses_of(lambda tokens: model(input_ids=tokens, labels=tokens).loss, trained, [TOKENS] * 5)


def test_training_is_that_over_weights_of_these_values(reference_te):
    """Through Transformer Engine's forward and backward, by its reference quantizers."""
    options = {"fp8_eval": True, "token_alignment": 16, "weight_cache": False, "custom": True}
    frozen, plain = adapted(), adapted()
    for model in (frozen, plain):
        fqns = [f for f, m in model.named_modules() if type(m) is nn.Linear and "lora_" not in f and "lm_head" not in f]
        convert_linears(model, fqns, **options)
    store_frozen_in_fp8(frozen, torch.device("cpu"))
    plain.load_state_dict(frozen.state_dict())
    found = losses(frozen)
    assert found == losses(plain)
    assert found[-1] < found[0]
