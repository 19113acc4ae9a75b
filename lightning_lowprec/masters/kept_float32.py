"""Find the parameters and buffers that stay float32 where a precision makes the others half precision.

A router's bias, a decay ``A_log`` or a rotary table has few values, and each decides about many: bf16 has 8 bits.

* what a model of ``transformers`` declares. ``_keep_in_fp32_modules_strict`` counts with bf16 and fp16, as in
  ``from_pretrained``. ``_keep_in_fp32_modules`` counts with fp16, as there; with bf16 its vectors count (norms,
  decays). Its matrices do not (T5's ``wo``): they are on the list for the range of fp16, which bf16 has;
* tensors of a known name, and the biases of routers;
* the tensors that the option ``keep_fp32`` names.

Beside them, :func:`coupled` finds parameters that are computed with buffers, and so must have the buffers' dtype: batch
norm refuses two dtypes, and spectral_norm multiplies its weight by buffers in operations that autocast does not know.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_lowprec.conversion.recipe_map import nearest_fqns
from lightning_lowprec.conversion.selection import matches, router
from lightning_lowprec.private import transformers
from lightning_lowprec.private.torch_modules import is_batch_or_instance_norm

KNOWN: Final = ("A_log", "dt_bias", "e_score_correction_bias", "expert_bias", "inv_freq", "original_inv_freq")
"""Last components of the fqns of tensors that every reference implementation keeps in float32."""


def kept_float32(model: nn.Module, dtype: torch.dtype, named: Sequence[str] = ()) -> dict[str, str]:
    """Return the fqns of parameters and buffers of ``model`` that stay float32, each with the reason.

    ``dtype`` is that of the other parameters, ``torch.bfloat16`` or ``torch.float16``. ``named`` is the option
    ``keep_fp32``; a name that matches nothing raises a ValueError. A model on the meta device works.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    floating = {fqn: tensor for fqn, tensor in tensors if tensor.is_floating_point()}
    outermost: dict[str, nn.Module] = {}  # models of transformers, by the prefix of their fqns
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if transformers.is_model(module) and not any(prefix.startswith(other) for other in outermost):
            outermost[prefix] = module
    reasons: dict[str, str] = {}
    for prefix, declaring in outermost.items():
        always = transformers.declares_float32(declaring, strict=True)
        sometimes = transformers.declares_float32(declaring, strict=False)
        for fqn in [fqn for fqn in floating if fqn.startswith(prefix)]:
            # without PEFT's wrapper of a layer: a declared "base" does not mean it
            name = fqn.removeprefix(prefix).replace("base_layer.", "")
            if always(name):
                reasons[fqn] = "_keep_in_fp32_modules_strict"
            elif (floating[fqn].ndim < 2 or dtype == torch.float16) and sometimes(name):
                reasons[fqn] = "_keep_in_fp32_modules"
    for fqn, tensor in floating.items():
        owner, _, name = fqn.rpartition(".")
        if name in KNOWN:
            reasons[fqn] = f"{name} (by name)"
        elif tensor.ndim == 1 and name == "bias" and router(model, owner) is not None:
            reasons[fqn] = "bias of a router"
    for pattern in named:  # a pattern matches "a", "a.b" or "a.b.c" of "a.b.c"
        around = {fqn: accumulate(fqn.split("."), "{}.{}".format) for fqn in floating}
        chosen = [fqn for fqn, names in around.items() if any(matches(pattern, name) for name in names)]
        reasons |= dict.fromkeys(chosen, f"`keep_fp32={pattern!r}`")
        if not chosen:
            raise ValueError(
                f"`keep_fp32={pattern!r}` matches no parameter, buffer or module of the model;"
                f" {nearest_fqns(pattern, floating)}. Give part of an fqn ('teacher', 'mlp.gate') or a pattern"
                " ('*.norm')."
            )
    return reasons


class Coupled(NamedTuple):
    """Parameters and floating-point buffers of one module that must have one dtype."""

    params: list[nn.Parameter]
    buffers: list[Tensor]
    is_batch_or_instance_norm: bool


def coupled(module: nn.Module) -> Iterator[Coupled]:
    """Yield parameters and buffers of batch norms, instance norms and both kinds of spectral_norm in ``module``."""
    for part in module.modules():
        params, buffers = dict(part.named_parameters(recurse=False)), dict(part.named_buffers(recurse=False))
        if is_batch_or_instance_norm(part) or isinstance(part, ParametrizationList):
            floating = [buffer for buffer in part.buffers() if buffer.is_floating_point()]
            yield Coupled(list(params.values()), floating, is_batch_or_instance_norm(part))
        for name in [name.removesuffix("_orig") for name in params if name.endswith("_orig")]:
            if {f"{name}_u", f"{name}_v"} <= buffers.keys():  # `torch.nn.utils.spectral_norm`, which is a hook
                vectors = [buffers[f"{name}_u"], buffers[f"{name}_v"]]
                yield Coupled([params[f"{name}_orig"]], vectors, is_batch_or_instance_norm=False)
