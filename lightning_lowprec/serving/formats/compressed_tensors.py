"""``compressed-tensors``: vLLM's and llm-compressor's FP8: e4m3, a scale per output channel, activations per token.

model.layers.0.mlp.up_proj.weight          [N, K] float8_e4m3fn
model.layers.0.mlp.up_proj.weight_scale    [N, 1] float32, weight = codes * weight_scale
"""

from __future__ import annotations

from typing import Any, Final

from lightning_lowprec.serving.formats.base import Choices, Format

_E4M3: Final = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "group_size": None,
    "block_structure": None,
    "actorder": None,
}


def _config(choices: Choices) -> dict[str, Any]:
    weights = {**_E4M3, "strategy": "channel", "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    activations = {**_E4M3, "strategy": "token", "dynamic": True, "observer": None, "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if choices.weights_only else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized" if choices.weights_only else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(choices.kept),
        "kv_cache_scheme": None,
    }


FORMAT: Final = Format(
    name="compressed-tensors", scale_per="row", names=lambda name: (name, f"{name}_scale"), config=_config
)
