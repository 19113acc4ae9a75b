"""The formats of a served model: names and shapes of codes and scales, and what the config says about them.

To add a format, write its :class:`Format` at the end of this file, and its name in :data:`FormatName`. All codes are
e4m3, and all stored scales are float32, by which codes are multiplied.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from lightning_lowprec.checks import check_choice

if TYPE_CHECKING:
    from lightning_lowprec.numerics.weight_rounding import ScalePer

_BLOCK: Final = 128
"""Rows and columns of a block of ``hf-fp8-block``, as ``numerics.weight_rounding`` rounds them."""
DtypeName = Literal["bf16", "fp32", "fp16"]
FormatName = Literal["hf", "hf-fp8-block", "compressed-tensors"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of a folder, for ``format=``."""

    scale_per: "ScalePer | None"
    """What has a scale of its own; None: the format has no codes."""
    scales: str = "_scale"
    """What the name of the reciprocal scales has behind that of the codes, the weight's."""
    config: Callable[[Sequence[str], bool], dict[str, object] | None] = lambda kept, weights_only: None
    """Returns ``quantization_config`` of the config.

    The arguments are the names of the linear layers in high precision, as modules of the model and as the folder names
    them, and whether the server multiplies in high precision, and reads weights only in FP8.
    """
    kept_because: Callable[[tuple[int, ...]], str | None] = lambda shape: None
    """Returns why a weight of this shape, [N, K], stays in high precision."""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a weight, [N, K]."""
        rows, columns = shape
        return (rows, 1) if self.scale_per == "row" else (-(-rows // _BLOCK), -(-columns // _BLOCK))


def find_format(name: str) -> Format:
    """Return the format of this name, or raise ValueError."""
    check_choice("format", name, get_args(FormatName))
    return _FORMATS[name]


# ---- hf-fp8-block:  x.weight [N, K], x.weight_scale_inv [ceil(N / 128), ceil(K / 128)]


def _block_config(kept: Sequence[str], weights_only: bool) -> dict[str, object]:
    if weights_only:
        raise ValueError(
            "`weights_only=True` is not valid with `format='hf-fp8-block'`, whose servers round activations too. Use"
            " 'compressed-tensors'."
        )
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",  # the server rounds activations by groups of 128 along K
        "weight_block_size": [_BLOCK, _BLOCK],
        "modules_to_not_convert": list(kept),
    }


def _cut_block(shape: tuple[int, ...]) -> str | None:
    # transformers takes the size of a block from the shapes of codes and scales
    cut = any(size > _BLOCK and size % _BLOCK for size in shape)
    return f"features are no multiples of {_BLOCK}" if cut else None


# ---- compressed-tensors:  x.weight [N, K], x.weight_scale [N, 1]

_E4M3: Final = {
    "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None,
}  # fmt: skip


def _compressed_config(kept: Sequence[str], weights_only: bool) -> dict[str, object]:
    weights = {**_E4M3, "strategy": "channel", "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
    activations = {**_E4M3, "strategy": "token", "dynamic": True, "observer": None, "observer_kwargs": {}}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if weights_only else activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized" if weights_only else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


# ---- all formats

_FORMATS: Final[Mapping[str, Format]] = {
    "hf": Format(scale_per=None),
    "hf-fp8-block": Format(scale_per="block", scales="_scale_inv", config=_block_config, kept_because=_cut_block),
    "compressed-tensors": Format(scale_per="row", config=_compressed_config),
}
