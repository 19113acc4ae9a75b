"""Which options of FP8TE go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from lightning_lowprec.te.recipes import CUSTOM

if TYPE_CHECKING:
    from lightning_lowprec.te.plugin import FP8TE

Base = Literal["bf16", "fp16"]


def check_base(base: object) -> None:
    """Raise ValueError for a dtype that is none of ``Base``."""
    if base not in get_args(Base):
        raise ValueError(f"`base={base!r}` is not valid; expected one of: {', '.join(get_args(Base))}.")


def check_options(plugin: FP8TE) -> None:
    """Raise ValueError for options that contradict each other, or the recipe."""
    if plugin.fuse not in ("auto", False):
        raise ValueError(f"`fuse={plugin.fuse!r}` is not valid; expected 'auto' or False.")
    if plugin.kind == "delayed" and plugin.layers.first_last_layers_bf16:
        raise ValueError(
            "`first_last_layers_bf16=True` is not valid with delayed scaling, whose scales are reduced for all"
            " layers at once (Megatron refuses it too); use `recipe='current'`."
        )
    if plugin.kind == "nvfp4" and plugin.base == "fp16":
        raise ValueError(
            "`base='fp16'` is not valid with `recipe='nvfp4'`, whose Hadamard transform is made for bf16; use"
            " `base='bf16'`."
        )
    if plugin.kind == CUSTOM and plugin.fuse:
        raise ValueError(
            "`fuse='auto'` is not valid with a CustomRecipe: the fused layers of Transformer Engine add biases in"
            " kernels that take no quantizers but its own. Leave `fuse` out, or use a recipe by name."
        )
    if plugin.fp8_params and plugin.fuse:
        raise ValueError(
            "`fp8_params=True` is not valid with `fuse='auto'`: a fused layer joins the weights of several and"
            " quantises them at each call. Use one of the two."
        )
    if plugin.fp8_params and not plugin.weight_cache:
        raise ValueError("`fp8_params=True` is not valid with `weight_cache=False`: it keeps quantised weights.")
