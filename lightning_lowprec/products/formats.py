"""The formats in which layers compute: one row for each recipe, which plugins, plans, names and ``lowprec`` read.

"To add a format" in docs/architecture.md shows a new row. This module imports no format, and no torch, as the command
``lowprec`` reads rows first: a row names its arithmetic.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_lowprec.runs_where import RecipeKey


@dataclass(frozen=True, kw_only=True)
class FormatSpec:
    """What a recipe is, beside its arithmetic."""

    precision: str
    """The name for ``precision=``, without an ending."""
    title: str = "FP8"
    """The format in words."""
    features: int = 16
    """The features of a layer are multiples of this number."""
    tile: int = 0
    """Rows and columns of what has a scale of its own in a weight; 0: the weight has one scale, or one per row."""
    scale_per: Literal["tensor", "row", "block"] | None = None
    """What has a scale in an exported weight; None: no server reads the codes."""
    one_code: bool = False
    """Whether forward and backward read the same codes of a weight, which FSDP2 can gather."""
    not_fp16: str | None = None
    """Why the base dtype is no fp16; None: it may be."""
    experts: bool = False
    """Whether stacked experts run in the format."""
    options: frozenset[str] = frozenset()
    """The options of the plugin that the format reads, beside those that all formats share."""
    emulates: bool = True
    """Whether the format can be emulated."""
    cpu: Literal["always", "torch 2.13", "never"] = "never"
    """When a CPU has kernels."""
    hardware: RecipeKey | None = None
    """The row of :mod:`~lightning_lowprec.runs_where`."""
    arithmetic: str | None = None
    """The class of this package that computes all products, and may import torchao; None: torchao's configuration."""

    @property
    def stores_codes(self) -> bool:
        """Whether frozen weights can be codes alone: the products read one set of codes, and servers read them too."""
        return self.one_code and self.scale_per is not None


_OF_TORCHAO: Final = frozenset({"fp8_format", "round_scales_to_power_of_2", "fast_accum", "experts", "pad_inner_dim"})
_ROWWISE: Final = FormatSpec(
    precision="fp8-rowwise",
    scale_per="row",
    not_fp16="its kernels round their output through bf16",
    experts=True,
    options=_OF_TORCHAO,
    cpu="torch 2.13",
    hardware="rowwise",
)
FORMATS: Final[dict[str, FormatSpec]] = {
    "tensorwise": FormatSpec(
        precision="fp8-hybrid",
        scale_per="tensor",
        one_code=True,
        experts=True,
        options=_OF_TORCHAO | {"weight_codes"},
        cpu="always",
        hardware="tensorwise",
    ),
    "rowwise": _ROWWISE,
    "rowwise_with_gw_hp": replace(_ROWWISE, precision="fp8-rowwise-gw-hp", hardware="rowwise-gw-hp"),
    "block": FormatSpec(
        precision="fp8-block",
        tile=128,
        scale_per="block",
        one_code=True,
        not_fp16="its kernels return bf16",
        hardware="torchao-block",
        arithmetic=".products.block:Block",
    ),
    "mxfp8": FormatSpec(
        precision="mxfp8",
        title="MXFP8",
        features=32,
        tile=32,
        one_code=True,
        not_fp16="its kernels take and return bf16",
        hardware="torchao-mxfp8",
        arithmetic=".products.mxfp8:MXFP8",
    ),
    "int8": FormatSpec(
        precision="int8-mixed",
        title="int8",
        emulates=False,
        cpu="always",
        hardware="int8",
        arithmetic=".products.int8:Int8",
    ),
}
"""By recipe."""
