"""Find the places of a model that may be fused, by structure alone: the classes of modules and the names of children.

A name in ``PLACES`` counts only together with exactly the class beside it. All these classes of transformers compute
``attention(norm(x))`` and ``mlp(norm(x))`` and read the norm's output nowhere else; if a version of transformers did,
:class:`~lightning_lowprec.te.fusion.modules.DeferredNormOutput` would raise.

:mod:`~lightning_lowprec.te.fusion.plan` decides which of the candidates are fused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class NormCandidate:
    """A norm, and the linear layers that read its output."""

    fqn: str
    """Of the norm."""
    norm: Any
    linears: dict[str, Any]
    """By fqn: the linear layers that read the norm's output."""
    inside: Any = None
    """The module that gets the norm's output and holds the linear layers: attention or MLP; None in a Sequential."""
    down: dict[str, Any] = field(default_factory=dict)
    """By fqn: the second linear layer of an MLP; empty if ``inside`` is no MLP."""
    activation: Any = None
    """The module between the linear layers of an MLP."""


@dataclass(frozen=True, kw_only=True)
class ExpertsCandidate:
    """The experts of a mixture, stacked in two Parameters."""

    fqn: str
    experts: nn.Module


@dataclass(frozen=True, kw_only=True)
class Place:
    """A norm in a decoder layer, and the linear layers that read the norm's output. Classes are full names."""

    layer: str
    """The class of the decoder layer."""
    norm: str
    norm_class: str
    inside: str
    """The child of the decoder layer that is called with the norm's output: attention or MLP."""
    inside_class: str
    linears: tuple[str, ...]
    down: tuple[str, ...] = ()
    """The second linear layer of an MLP."""
    activation: str = ""
    """The activation of an MLP; with two ``linears`` it acts on the first and multiplies with the second."""


def _llama_like(package: str, name: str) -> tuple[Place, Place]:
    classes = f"transformers.models.{package}.modeling_{package}.{name}"
    common: Any = {"layer": f"{classes}DecoderLayer", "norm_class": f"{classes}RMSNorm"}
    return (
        Place(
            **common, norm="input_layernorm", inside="self_attn", inside_class=f"{classes}Attention",
            linears=("q_proj", "k_proj", "v_proj"),
        ),
        Place(
            **common, norm="post_attention_layernorm", inside="mlp", inside_class=f"{classes}MLP",
            linears=("gate_proj", "up_proj"), down=("down_proj",), activation="act_fn",
        ),
    )  # fmt: skip


_NEOX = "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoX"
_LAYER_NORM = "torch.nn.modules.normalization.LayerNorm"
PLACES = (
    *_llama_like("llama", "Llama"),
    *_llama_like("mistral", "Mistral"),
    *_llama_like("qwen2", "Qwen2"),
    *_llama_like("qwen3", "Qwen3"),
    _llama_like("mixtral", "Mixtral")[0],  # a router reads the other norm, before the experts
    Place(
        layer=f"{_NEOX}Layer", norm="input_layernorm", norm_class=_LAYER_NORM,
        inside="attention", inside_class=f"{_NEOX}Attention", linears=("query_key_value",),
    ),
    Place(
        layer=f"{_NEOX}Layer", norm="post_attention_layernorm", norm_class=_LAYER_NORM,
        inside="mlp", inside_class=f"{_NEOX}MLP", linears=("dense_h_to_4h",),
        down=("dense_4h_to_h",), activation="act",
    ),
)  # fmt: skip

_added: list[Place] = []
"""The places of :func:`add_places`, in the order in which they came."""


def add_places(*places: Place) -> None:
    """Let fusion recognise decoder layers of the user's own, in every model from now on; a known place stays once.

    The caller promises that the layer computes ``inside(norm(x))``, and of an MLP
    ``down(activation(first(x)) * second(x))``. A layer that reads the norm's output elsewhere raises when it runs.

        own = "my_package.model"
        add_places(
            Place(layer=f"{own}.Block", norm="norm1", norm_class="torch.nn.modules.normalization.RMSNorm",
                  inside="attention", inside_class=f"{own}.Attention", linears=("wq", "wk", "wv")),
        )

    Raises:
        ValueError: a place names no linear layer, or has a ``down`` without an ``activation``.
    """
    for place in places:
        if not place.linears:
            raise ValueError(f"`linears=()` of the place of {place.layer!r} is not valid; name the linear layers.")
        if bool(place.down) != bool(place.activation):
            raise ValueError(
                f"`down={place.down!r}` with `activation={place.activation!r}` of the place of {place.layer!r} is not"
                " valid; an MLP needs both, an attention neither."
            )
    _added.extend(place for place in dict.fromkeys(places) if place not in (*PLACES, *_added))


ACTIVATIONS = {
    "transformers.activations.SiLUActivation": "silu",
    "transformers.activations.NewGELUActivation": "gelu",
    "transformers.activations.FastGELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu",
    "transformers.activations.AccurateGELUActivation": "gelu",
    "transformers.activations.ReLUSquaredActivation": "srelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.ReLU": "relu",
}
"""Names of Transformer Engine by class. Its ``gelu`` is the tanh approximation; it has no exact one (erf)."""


def activation_name(module: nn.Module, *, gated: bool) -> str | None:
    """Return Transformer Engine's name of an activation, or None if it has no activation that is exactly equal."""
    name = ACTIVATIONS.get(f"{type(module).__module__}.{type(module).__name__}")
    return {"silu": "swiglu"}.get(name or "") if gated else name


def candidates(model: nn.Module) -> Iterator[NormCandidate | ExpertsCandidate]:
    """Yield all candidates, in the order of ``named_modules``."""
    for fqn, module in model.named_modules():
        for place in (*PLACES, *_added):
            if _is(module, place.layer):
                yield from _in_layer(fqn, module, place)
        if type(module) is nn.Sequential:
            yield from _in_sequential(fqn, module)
        elif _is_stack_of_experts(module):
            yield ExpertsCandidate(fqn=fqn, experts=module)


def _is(module: nn.Module, name: str) -> bool:
    """Return whether the module is exactly of the class ``name``, not of a namesake."""
    package, _, class_name = name.rpartition(".")
    return type(module) is getattr(sys.modules.get(package), class_name, None)


def _in_layer(fqn: str, layer: nn.Module, place: Place) -> Iterator[NormCandidate]:
    norm, inside = layer._modules.get(place.norm), layer._modules.get(place.inside)
    if norm is None or inside is None or not _is(norm, place.norm_class) or not _is(inside, place.inside_class):
        return
    yield NormCandidate(
        fqn=_join(fqn, place.norm),
        norm=norm,
        linears={_join(fqn, f"{place.inside}.{name}"): inside._modules[name] for name in place.linears},
        inside=inside,
        down={_join(fqn, f"{place.inside}.{name}"): inside._modules[name] for name in place.down},
        activation=inside._modules.get(place.activation),
    )


def _in_sequential(fqn: str, sequential: nn.Sequential) -> Iterator[NormCandidate]:
    for (name, norm), (behind, linear) in pairwise(sequential._modules.items()):
        if type(norm) in (nn.LayerNorm, nn.RMSNorm) and type(linear) is nn.Linear:
            yield NormCandidate(fqn=_join(fqn, name), norm=norm, linears={_join(fqn, behind): linear})


def _is_stack_of_experts(module: nn.Module) -> bool:
    """Return whether transformers would run the module as grouped GEMMs (its ``use_experts_implementation``)."""
    described = {"has_gate", "has_bias", "is_transposed", "is_concatenated"} <= module.__dict__.keys()
    of_transformers = type(module).__module__.startswith("transformers.")
    return described and of_transformers and {"gate_up_proj", "down_proj"} <= module._parameters.keys()


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
