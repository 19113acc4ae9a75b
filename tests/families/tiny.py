"""Build a tiny model of any family of transformers, from nothing but its class of configurations."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

MODELS = Path(transformers.__file__).parent / "models"
VOCABULARY = 96
RULES: tuple[tuple[str, int], ...] = (  # the largest value of an integer option whose name matches; the first rule wins
    (r"vocab_size", VOCABULARY),
    (r"_token_id$|_token_index$|_idx$", 90),
    (r"layers$|^n_layer$|^depth$|num_blocks$|^num_layers_", 3),
    (r"experts_per_tok(en)?|top_k(_experts)?$|moe_top_?k|num_selected_experts|experts_top_k|moe_k$", 2),
    (r"(num|n)_?(local|routed)?_?experts?$|moe_num_experts", 4),
    (r"first_k_dense_replace|num_dense_layers|layer_start_index|decoder_sparse_step|layer_interval|layer_step", 1),
    (r"n_group|topk_group|n_groups|expert_group|o_groups", 1),
    (r"key_value_heads$|kv_heads", 2),
    (r"heads$|n_head$", 4),
    (r"lora_rank|qk?_head_dim$", 32),
    (r"head_dim$|d_kv", 16),
    (r"state_size|d_state|sliding_window|chunk_size|index_topk|block_size|window", 16),
    (r"max_position|n_positions", 256),
    (r"(hidden|embed(ding)?)_?(size|dim)$|d_model$|n_embd|^dim$|width$", 64),
    (r"intermediate|d_ff$|ffn_dim|ffn_hidden|mlp_dim|inner_dim|moe_latent", 96),
    (r"image_size", 32),
    (r"patch_size", 8),
)
LARGEST = 64
"""The largest value of any other integer option, from 512 on."""
IF_NONE = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
IF_NONE |= {"top_k_experts": 2, "moe_intermediate_size": 96}
OPTIONS: dict[str, dict[str, Any]] = {  # where options depend on each other
    "BailingHybridConfig": {"layer_group_size": 2},
    "BambaConfig": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [96, 48]},
    "Ernie4_5_VL_MoeTextConfig": {"moe_intermediate_size": [96, 48]},
    "Gemma4TextConfig": {"enable_moe_block": True, "num_kv_shared_layers": 0},
    "Glm4vMoeTextConfig": {"head_dim": 128},
    "GraniteMoeHybridConfig": {
        "layer_types": ["mamba", "attention", "attention"],
        "num_local_experts": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_expand": 2,
    },
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "num_key_value_heads": 2},
    "HYV4VLTextConfig": {"qk_rope_head_dim": 64, "index_head_dim": 128},
    "JambaConfig": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention", "conv"]},
    "OpenAIPrivacyFilterConfig": {"num_labels": VOCABULARY},
}
ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "Classification", "Model")


def families(word: str = "") -> list[str]:
    """Return the modules of transformers that define models, and have ``word`` in their text."""
    files = sorted(MODELS.glob("*/modeling_*.py"))
    files = [file for file in files if not file.stem.startswith(("modeling_flax", "modeling_tf"))]
    return [f"transformers.models.{file.parent.name}.{file.stem}" for file in files if word in file.read_text()]


def classes(family: str) -> list[type[PreTrainedModel]]:
    """Return the models of a module, those with a loss first."""

    def order(cls: type) -> tuple[int, int]:
        ending = next((i for i, name in enumerate(ENDINGS) if cls.__name__.endswith(name)), len(ENDINGS))
        return ending, len(cls.__name__)

    try:
        module = importlib.import_module(family)
    except ImportError:  # needs a package that is not installed
        return []
    found = [cls for _, cls in inspect.getmembers(module, inspect.isclass)]
    found = [cls for cls in found if issubclass(cls, PreTrainedModel) and cls.__module__ == family]
    found = [cls for cls in found if cls.config_class and not cls.__name__.endswith("PreTrainedModel")]
    return sorted(found, key=order)


def config(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    own = cls()
    known = {name for base in cls.__mro__ for name in (*vars(base).get("__annotations__", ()), *_arguments(base))}
    options = {}
    for name, value in vars(own).items():
        if name in known and name != "rope_parameters":
            small = _small(name, value, getattr(own, "num_hidden_layers", None))
            if small is not value:
                options[name] = small
    if getattr(own, "num_key_value_heads", 0) == getattr(own, "num_attention_heads", 1):
        options["num_key_value_heads"] = options.get("num_attention_heads", own.num_attention_heads)
    return cls(**options | OPTIONS.get(cls.__name__, {}))


def _arguments(cls: type) -> Iterator[str]:
    return iter(inspect.signature(vars(cls)["__init__"]).parameters if "__init__" in vars(cls) else ())


def _small(name: str, value: Any, layers: int | None) -> Any:
    if isinstance(value, PreTrainedConfig):
        return config(type(value))
    if isinstance(value, list) and len(value) > 3 and len(value) == layers:  # three layers, of three kinds if there are
        kinds = {str(kind): kind for kind in value}
        return [*kinds.values(), *value[-3:]][:3]
    if value is None:
        return IF_NONE.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    largest = next((size for pattern, size in RULES if re.search(pattern, name)), None)
    largest = largest or (LARGEST if value >= 512 else value)
    return value if value <= largest else largest


def build(cls: type[PreTrainedModel]) -> PreTrainedModel:
    """Return a tiny model in train mode, the same at each call."""
    torch.manual_seed(0)
    return cls(config(cls.config_class)).train()


def batch(model: nn.Module) -> dict[str, Tensor]:
    """Return what a tiny model takes: two sequences of 16 tokens, or two images."""
    takes = inspect.signature(model.forward).parameters
    tokens = torch.randint(3, 80, (2, 16), generator=torch.Generator().manual_seed(0))
    if "input_ids" in takes:
        return {name: tokens for name in ("input_ids", "decoder_input_ids", "labels") if name in takes}
    if "pixel_values" in takes:
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    raise NotImplementedError(f"{type(model).__name__} takes neither tokens nor images")


def loss_of(output: Any) -> Tensor:
    """Return the loss of a model's output, or one that reaches the weights."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    values = output.values() if hasattr(output, "values") else (output,)
    value = next(v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.requires_grad)
    return value.float().square().mean()
