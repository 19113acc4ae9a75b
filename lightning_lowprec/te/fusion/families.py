"""The decoder layers of transformers in which norms and linear layers may be fused, and names of activations.

A name in this table counts only together with exactly the class beside it. All these classes compute
``attention(norm(x))`` and ``mlp(norm(x))`` and read the norm's output nowhere else; if a version of transformers did,
:class:`~lightning_lowprec.te.fusion.modules.DeferredNormOutput` would raise.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A norm, and the linear layers inside one child of the decoder layer that read the norm's output."""

    norm: str
    inside: str
    """The child that is called with the norm's output: attention or MLP."""
    cls: str
    """The class of ``inside``."""
    linears: tuple[str, ...]
    down: str | None = None
    """The second linear layer of an MLP."""
    activation: str | None = None
    """The activation of an MLP; with two ``linears`` it acts on the first and multiplies with the second."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A decoder layer of transformers."""

    module: str
    layer: str
    norm: str | None
    """The class of its norms; None: ``torch.nn.LayerNorm``."""
    pairs: tuple[Pair, ...]


def _llama_like(package: str, name: str, *, dense: bool = True) -> Family:
    attention = Pair(
        norm="input_layernorm", inside="self_attn", cls=f"{name}Attention", linears=("q_proj", "k_proj", "v_proj")
    )
    mlp = Pair(
        norm="post_attention_layernorm", inside="mlp", cls=f"{name}MLP", linears=("gate_proj", "up_proj"),
        down="down_proj", activation="act_fn",
    )  # fmt: skip
    return Family(
        module=f"transformers.models.{package}.modeling_{package}",
        layer=f"{name}DecoderLayer",
        norm=f"{name}RMSNorm",
        pairs=(attention, mlp) if dense else (attention,),  # a router reads the norm before the experts
    )


FAMILIES = (
    _llama_like("llama", "Llama"),
    _llama_like("mistral", "Mistral"),
    _llama_like("qwen2", "Qwen2"),
    _llama_like("qwen3", "Qwen3"),
    _llama_like("mixtral", "Mixtral", dense=False),
    Family(
        module="transformers.models.gpt_neox.modeling_gpt_neox",
        layer="GPTNeoXLayer",
        norm=None,
        pairs=(
            Pair(norm="input_layernorm", inside="attention", cls="GPTNeoXAttention", linears=("query_key_value",)),
            Pair(
                norm="post_attention_layernorm", inside="mlp", cls="GPTNeoXMLP", linears=("dense_h_to_4h",),
                down="dense_4h_to_h", activation="act",
            ),
        ),
    ),
)  # fmt: skip

ACTIVATIONS = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "NewGELUActivation"): "gelu",
    ("transformers.activations", "FastGELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu",
    ("transformers.activations", "AccurateGELUActivation"): "gelu",
    ("transformers.activations", "ReLUSquaredActivation"): "srelu",
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("torch.nn.modules.activation", "ReLU"): "relu",
}
"""Names of Transformer Engine by class. Its ``gelu`` is the tanh approximation; it has no exact one (erf)."""
_GATED = {"silu": "swiglu"}


def activation_name(module: nn.Module, *, gated: bool) -> str | None:
    """Return Transformer Engine's name of an activation, or None if it has no activation that is exactly equal."""
    cls = type(module)
    name = ACTIVATIONS.get((cls.__module__, cls.__name__))
    return _GATED.get(name or "") if gated else name
