"""Find the parameters and buffers that stay float32 where a precision makes the others half precision.

A router's bias, a decay ``A_log`` or a rotary table has few values, and each decides about many: bf16 has 8 bits.

* what a model of ``transformers`` declares. ``_keep_in_fp32_modules_strict`` counts with bf16 and fp16, as in
  ``from_pretrained``. ``_keep_in_fp32_modules`` counts with fp16, as there; with bf16 its vectors count (norms,
  decays). Its matrices do not (T5's ``wo``): they are on the list for the range of fp16, which bf16 has;
* tensors of a known name, and the biases of routers;
* the tensors that the option ``keep_fp32`` names.

Beside them, :func:`coupled` finds parameters that are computed with buffers, and so must have the buffers' dtype.
Autocast does not help such a parameter: batch norm refuses weights and running statistics of two dtypes, and the power
iteration of spectral_norm multiplies the weight by buffers outside of the operations that autocast knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_lowprec.conversion.recipe_map import nearest_fqns
from lightning_lowprec.conversion.selection import matches, router
from lightning_lowprec.private import transformers
from lightning_lowprec.private.torch_modules import is_batch_norm

KNOWN: Final = ("A_log", "dt_bias", "e_score_correction_bias", "expert_bias", "inv_freq", "original_inv_freq")
"""Last components of the fqns of tensors that every reference implementation keeps in float32."""


def kept_float32(model: nn.Module, dtype: torch.dtype, named: Sequence[str] = ()) -> dict[str, str]:
    """Return the fqns of parameters and buffers of ``model`` that stay float32, each with the reason.

    ``dtype`` is that of the other parameters, ``torch.bfloat16`` or ``torch.float16``. ``named`` is the option
    ``keep_fp32``; a name that matches nothing raises a ValueError. A model on the meta device works.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    floating = {fqn: tensor for fqn, tensor in tensors if tensor.is_floating_point()}
    reasons: dict[str, str] = {}
    for prefix, declares in _declarations(model, dtype):
        inside = (fqn for fqn in floating if fqn.startswith(prefix))
        reasons |= {fqn: reason for fqn in inside if (reason := declares(fqn.removeprefix(prefix), floating[fqn]))}
    for fqn, tensor in floating.items():
        owner, _, name = fqn.rpartition(".")
        if name in KNOWN:
            reasons[fqn] = f"{name} (by name)"
        elif tensor.ndim == 1 and name == "bias" and router(model, owner) is not None:
            reasons[fqn] = "bias of a router"
    for pattern in named:
        chosen = [fqn for fqn in floating if any(matches(pattern, part) for part in _enclosing(fqn))]
        reasons |= dict.fromkeys(chosen, f"`keep_fp32={pattern!r}`")
        if not chosen:
            raise ValueError(
                f"`keep_fp32={pattern!r}` matches no parameter, buffer or module of the model;"
                f" {nearest_fqns(pattern, floating)}. Give part of an fqn ('teacher', 'mlp.gate') or a pattern"
                " ('*.norm')."
            )
    return reasons


def _declarations(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[str, Tensor], str | None]]]:
    """Yield the prefix of each outermost model of transformers, and a function that says what the model declares."""
    outer: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if not transformers.is_model(module) or any(prefix.startswith(other) for other in outer):
            continue
        outer.append(prefix)
        always = transformers.declares_float32(module, strict=True)
        sometimes = transformers.declares_float32(module, strict=False)

        yield prefix, functools.partial(_declared, always, sometimes, dtype)


def _declared(
    always: Callable[[str], bool], sometimes: Callable[[str], bool], dtype: torch.dtype, fqn: str, tensor: Tensor
) -> str | None:
    """Return the attribute of a model of transformers by which a tensor stays float32, or None."""
    name = fqn.replace("base_layer.", "")  # PEFT's wrapper of a layer: a declared "base" does not mean it
    if always(name):
        return "_keep_in_fp32_modules_strict"
    counts = tensor.ndim < 2 or dtype == torch.float16
    return "_keep_in_fp32_modules" if counts and sometimes(name) else None


def _enclosing(fqn: str) -> Iterator[str]:
    """Yield ``"a"``, ``"a.b"`` and ``"a.b.c"`` for ``"a.b.c"``."""
    return accumulate(fqn.split("."), "{}.{}".format)


@dataclass(frozen=True, kw_only=True)
class Coupled:
    """Parameters and floating-point buffers of one module that must have one dtype."""

    params: list[nn.Parameter]
    buffers: list[Tensor]
    is_batch_norm: bool


def coupled(module: nn.Module) -> Iterator[Coupled]:
    """Yield the parameters of batch norms and of both kinds of spectral_norm in ``module``, with their buffers."""
    for part in module.modules():
        if is_batch_norm(part):
            yield _coupled(list(part.parameters(recurse=False)), list(part.buffers(recurse=False)), is_batch_norm=True)
        elif isinstance(part, ParametrizationList):
            yield _coupled(list(part.parameters(recurse=False)), list(part.buffers()))
        params, buffers = dict(part.named_parameters(recurse=False)), dict(part.named_buffers(recurse=False))
        for name in [name.removesuffix("_orig") for name in params if name.endswith("_orig")]:
            if {f"{name}_u", f"{name}_v"} <= buffers.keys():  # `torch.nn.utils.spectral_norm`, which is a hook
                yield _coupled([params[f"{name}_orig"]], [buffers[f"{name}_u"], buffers[f"{name}_v"]])


def _coupled(params: list[nn.Parameter], buffers: list[Tensor], *, is_batch_norm: bool = False) -> Coupled:
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    return Coupled(params=params, buffers=floating, is_batch_norm=is_batch_norm)
