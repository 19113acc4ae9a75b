"""Small random decoders of transformers, and the linear layers of a model."""

import torch
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
MAKERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama-biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager", rms_norm_eps=0.1)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    # every token sees every expert: no choice that a rounding error could turn over
    "mixtral-all": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=4)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)),
    "neox-tanh-serial": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**NEOX, hidden_act="gelu_new", use_parallel_residual=False, layer_norm_eps=0.1)
    ),
}


def make(name):
    """In eval mode; every Parameter is random, norms and biases too, so that none can be mistaken for another."""
    torch.manual_seed(0)
    model = MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def linears(model):
    return [fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)]


def experts(model):
    return [fqn for fqn, _ in model.named_parameters() if fqn.endswith(("experts.gate_up_proj", "experts.down_proj"))]


def ragged(batch, length):
    """Token ids and a mask that hides the left of the first row."""
    torch.manual_seed(1)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length)), "attention_mask": mask}
