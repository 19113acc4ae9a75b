"""The decoder by Transformer Engine's own blocks: ``te.TransformerLayer``, as a user would write it by hand.

One call of Transformer Engine computes a norm with the products behind the norm, query, key and value in one product,
rotary positions by one kernel. Under autocast the layer casts the hidden states to bf16, so that the sums from block
to block are bf16; the other contenders with float32 weights keep these sums in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rivals.models import ROPE_BASE, Block, Llama, Shape
from benchmarks.rivals.running import Job, Running, compile_blocks
from benchmarks.rivals.setups import both_autocasts, te_norm, te_recipe


def te_layers(job: Job, *, recipe: str, compiled: bool = False, fp8_attention: bool = False) -> Running:
    """Replace every block by a ``te.TransformerLayer`` with the same weights.

    Attention is torch's, as in every other contender. With ``fp8_attention`` attention is Transformer Engine's, in
    float8, which needs cuDNN.
    """
    bare = job.model()
    use_te_layers(bare, own_attention=fp8_attention)
    bare.norm = te_norm(bare.norm)
    if compiled:
        compile_blocks(bare, job)
    context = both_autocasts(job, te_recipe(recipe, **({"fp8_dpa": True} if fp8_attention else {})))
    return Running(model=bare, bare=bare, optimizer=job.make_optimizer(bare), context=context)


def use_te_layers(model: Llama, *, own_attention: bool = False) -> None:
    """Replace the blocks in place; with ``own_attention`` attention is Transformer Engine's."""
    shape: Any = model.shape
    turn = angles(shape.sequence, shape.head_dim).to(model.turn.device)
    for index, block in enumerate(list(model.layers)):
        model.layers[index] = TEBlock(block, shape, turn, own_attention=own_attention)


class TEBlock(nn.Module):
    """A block of the decoder, computed by one ``te.TransformerLayer``."""

    def __init__(self, block: Block, shape: Shape, turn: Tensor, *, own_attention: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        weight = block.attention.q_proj.weight
        self.layer: Any = te.TransformerLayer(
            shape.hidden, shape.ffn, shape.heads, num_gqa_groups=shape.kv_heads, layernorm_epsilon=1e-5,
            hidden_dropout=0.0, attention_dropout=0.0, params_dtype=weight.dtype, device=weight.device, bias=False,
            normalization="RMSNorm", activation="swiglu", attn_input_format="bshd",
        )  # fmt: skip
        if not own_attention:
            self.layer.self_attention.core_attention = TorchAttention()
        take_weights(self.layer, block)
        self.angles: Tensor
        self.register_buffer("angles", turn, persistent=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """x: (B, T, hidden) -> (B, T, hidden) bf16; ``turn`` is for blocks that rotate by torch."""
        out: Tensor = self.layer(x, rotary_pos_emb=self.angles[: x.shape[1]])
        return out


class TorchAttention(nn.Module):
    """Attention as in the other contenders, with the face of ``te.DotProductAttention``."""

    name = None
    output_quantizer_role = None
    grad_input_quantizer_role = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        """query: (B, T, heads, D), key, value: (B, T, kv heads, D) -> (B, T, heads x D)."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


@torch.no_grad()
def take_weights(layer: Any, block: Block) -> None:
    """Copy the weights of a block; the layer has those of gate and up in one."""
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    qkv = attention.layernorm_qkv
    pairs = (
        (qkv.layer_norm_weight, block.attention_norm.weight),
        (qkv.query_weight, block.attention.q_proj.weight),
        (qkv.key_weight, block.attention.k_proj.weight),
        (qkv.value_weight, block.attention.v_proj.weight),
        (attention.proj.weight, block.attention.o_proj.weight),
        (mlp.layer_norm_weight, block.mlp_norm.weight),
        (mlp.fc1_weight, torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight])),
        (mlp.fc2_weight, block.mlp.down_proj.weight),
    )
    for ours, theirs in pairs:
        ours.copy_(theirs)


def angles(length: int, features: int) -> Tensor:
    """Return the angles of rotary positions in Transformer Engine's layout: (length, 1, 1, features) float32."""
    frequency = ROPE_BASE ** (-torch.arange(0, features, 2) / features)
    half = torch.arange(length)[:, None] * frequency
    return torch.cat([half, half], dim=-1)[:, None, None]
