"""With bf16 weights, what flows from block to block is bf16: embeddings, norms, residual additions."""

import lightning as L
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPTNeoXConfig, GPTNeoXForCausalLM

from benchmarks.rivals import models

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "GPT-NeoX": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "BERT, norms behind the blocks": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "the ledger's": lambda: models.Llama(models.TOY),
}


def dtypes_between(model, fabric):
    wrapped = fabric.setup_module(model)
    found = set()

    def note(module, args, output):
        tensors = [*args[:1], *(output if isinstance(output, tuple) else (output,))]
        found.update(t.dtype for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point())

    blocks = [block for stack in model.modules() if isinstance(stack, nn.ModuleList) for block in stack]
    assert len(blocks) >= 2
    for module in (*blocks, *(m for m in model.modules() if type(m).__name__.endswith("Norm"))):
        module.register_forward_hook(note)
    tokens = torch.zeros(2, 16, dtype=torch.long, device=fabric.device)
    if isinstance(model, models.Llama):
        loss = wrapped(tokens, tokens)
    else:
        loss = wrapped(input_ids=tokens).logits.float().mean()
    fabric.backward(loss)
    return found


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["fp8-hybrid-remainder", "fp8-hybrid-te-remainder"])
def test_the_residual_stream_is_bf16(kind, name):
    fabric = L.Fabric(accelerator="cuda", devices=1, precision=name)
    if hasattr(fabric.strategy.precision, "compile"):
        fabric.strategy.precision.compile = False
    assert dtypes_between(MODELS[kind](), fabric) == {torch.bfloat16}
