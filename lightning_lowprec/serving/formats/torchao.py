"""``torchao``: the ``Float8Tensor`` of ``torchao.quantization``, e4m3 with a scale per row, stored in safetensors.

    model.layers.0.mlp.up_proj._weight_qdata    [N, K] float8_e4m3fn
    model.layers.0.mlp.up_proj._weight_scale    [N, 1] float32, weight = qdata * scale

The header of every file describes every tensor, as ``torchao.prototype.safetensors`` writes it.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from lightning_lowprec.extras import require
from lightning_lowprec.serving.formats.base import Choices, Format, Header


def _names(name: str) -> tuple[str, str]:
    module, _, parameter = name.rpartition(".")
    return f"{module}._{parameter}_qdata", f"{module}._{parameter}_scale"


def _config(choices: Choices) -> dict[str, Any]:
    quantization = require("torchao.quantization", "format='torchao'")
    quant_type = (
        quantization.Float8WeightOnlyConfig()
        if choices.weights_only
        else quantization.Float8DynamicActivationFloat8WeightConfig(granularity=quantization.PerRow())
    )
    config = require("transformers", "format='torchao'").TorchAoConfig(
        quant_type, modules_to_not_convert=list(choices.kept)
    )
    return {**config.to_dict(), "quant_method": "torchao"}


def _metadata(header: Header) -> dict[str, str]:
    safetensors = require("torchao.prototype.safetensors.safetensors_support", "format='torchao'")
    quantization = require("torchao.quantization", "format='torchao'")
    of_activations = None if header.weights_only else _of_activations(quantization)
    made: dict[str, Any] = {name: torch.empty(0) for name in header.plain}
    for name, shape in header.coded.items():
        made[name] = quantization.Float8Tensor(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty((shape[0], 1), device="meta"),
            block_size=[1, shape[1]],
            mm_config=None if of_activations is None else of_activations.mm_config,
            act_quant_kwargs=of_activations,
            dtype=header.dtype,
        )
    described: dict[str, str] = safetensors.flatten_tensor_state_dict(made)[1]
    return described


def _of_activations(quantization: Any) -> Any:
    workflows = require("torchao.quantization.quantize_.workflows", "format='torchao'")
    inference = require("torchao.float8.inference", "format='torchao'")
    products = inference.Float8MMConfig(use_fast_accum=True)
    return workflows.QuantizeTensorToFloat8Kwargs(granularity=quantization.PerRow(), mm_config=products)


FORMAT: Final = Format(
    name="torchao",
    scale_per="row",
    names=_names,
    config=_config,
    takes_experts=False,  # transformers 5 finds no codes for the Parameter in which it stacks the experts
    activation_scales_in_float32=False,
    metadata=_metadata,
)
