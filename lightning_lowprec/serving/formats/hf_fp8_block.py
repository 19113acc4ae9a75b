"""``hf-fp8-block``: DeepSeek's and Hugging Face's fine-grained FP8: e4m3, and a scale per 128 x 128 values.

    model.layers.0.mlp.up_proj.weight              [N, K] float8_e4m3fn
    model.layers.0.mlp.up_proj.weight_scale_inv    [ceil(N / 128), ceil(K / 128)] float32, weight = codes * scale_inv

The server rounds activations by groups of 128 along K.
"""

from __future__ import annotations

from typing import Any, Final

from lightning_lowprec.numerics.weight_rounding import BLOCK
from lightning_lowprec.serving.formats.base import Choices, Format


def _config(choices: Choices) -> dict[str, Any]:
    if choices.weights_only:
        raise ValueError(
            "`weights_only=True` is not valid with `format='hf-fp8-block'`, whose servers round activations too. Use"
            " 'compressed-tensors' or 'torchao'."
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(choices.kept),
    }


def _refusal(shape: tuple[int, ...]) -> str | None:
    # transformers takes the size of a block from the shapes of codes and scales
    cut = any(size > BLOCK and size % BLOCK for size in shape)
    return f"features are no multiples of {BLOCK}" if cut else None


FORMAT: Final = Format(
    name="hf-fp8-block",
    scale_per="block",
    names=lambda name: (name, f"{name}_scale_inv"),
    config=_config,
    refusal=_refusal,
)
