"""Tiny models of transformers, whose weights have rows of very different sizes, and how to load what was exported."""

import json

import lightning as L
import torch
import transformers
from safetensors import safe_open

from tests.toys import Task, causal_loss

SIZES = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
}
FP8_FORMATS = ("hf-fp8-block", "compressed-tensors")


class Module(Task):
    def __init__(self, **more):
        super().__init__(llama(), causal_loss)
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, tokens):
        return self.net(tokens)

    def validation_step(self, tokens, _):
        self.log("loss", self.loss(self.net, tokens), sync_dist=True)


def spread_rows(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                shape = (*parameter.shape[:-1], 1)
                parameter.mul_(torch.exp2(torch.rand(shape, generator=generator) * 8 - 4))
    return model


def llama(**options):
    torch.manual_seed(0)
    return spread_rows(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **options})))


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2)
    return spread_rows(transformers.MixtralForCausalLM(config))


def gpt_oss():
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2, head_dim=32)
    return spread_rows(transformers.GptOssForCausalLM(config))


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=64, n_layer=1, n_head=4)
    return spread_rows(transformers.GPT2LMHeadModel(config))


def converted(model, precision):
    L.Fabric(accelerator="cpu", devices=1, precision=precision).strategy.precision.convert_module(model)
    return model


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def decoded(folder, format):
    """The values of all tensors: codes times their scales, by the documented formula of each format."""
    stored, values = tensors(folder), {}
    for name, tensor in stored.items():
        if name.endswith(("_scale", "_scale_inv")):
            continue
        if tensor.dtype != torch.float8_e4m3fn:
            values[name] = tensor
        elif format == "compressed-tensors":
            values[name] = tensor.float() * stored[f"{name}_scale"]
        else:
            rows, columns = tensor.shape
            scale = stored[f"{name}_scale_inv"].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            values[name] = tensor.float() * scale
    return values


def config(folder):
    return json.loads((folder / "config.json").read_text())


def served(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
