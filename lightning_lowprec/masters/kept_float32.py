"""Find the parameters and buffers that stay float32 where a precision makes the others half precision.

A router's bias, a decay ``A_log`` or a rotary table has few values, and each decides about many: bf16 has 8 bits.

* what a model of ``transformers`` declares. ``_keep_in_fp32_modules_strict`` counts with bf16 and fp16, as in
  ``from_pretrained``. ``_keep_in_fp32_modules`` counts with fp16, as there; with bf16 its vectors count (norms,
  decays). Its matrices do not (T5's ``wo``): they are on the list for the range of fp16, which bf16 has;
* tensors of a known name, and the biases of routers;
* the tensors that the option ``keep_fp32`` names.

Weights that are computed with float32 buffers: see :mod:`~lightning_lowprec.masters.coupled`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from lightning_lowprec.conversion.selection import matches, router
from lightning_lowprec.private import transformers

KNOWN: Final = ("A_log", "dt_bias", "e_score_correction_bias", "expert_bias", "inv_freq", "original_inv_freq")
"""Last components of the fqns of tensors that every reference implementation keeps in float32."""


def kept_float32(model: nn.Module, dtype: torch.dtype, named: Sequence[str] = ()) -> dict[str, str]:
    """Return the fqns of parameters and buffers of ``model`` that stay float32, each with the reason.

    Args:
        model: read by names and shapes; a model on the meta device works.
        dtype: of the other parameters: ``torch.bfloat16`` or ``torch.float16``.
        named: the option ``keep_fp32``.

    Raises:
        ValueError: a name of ``named`` matches nothing.
    """
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    floating = {fqn: tensor for fqn, tensor in tensors if tensor.is_floating_point()}
    found: dict[str, str] = {}
    for prefix, declares in _declarations(model, dtype):
        inside = (fqn for fqn in floating if fqn.startswith(prefix))
        found |= {fqn: reason for fqn in inside if (reason := declares(fqn.removeprefix(prefix), floating[fqn]))}
    for fqn, tensor in floating.items():
        owner, _, name = fqn.rpartition(".")
        if name in KNOWN:
            found[fqn] = f"{name} (by name)"
        elif tensor.ndim == 1 and name == "bias" and router(model, owner) is not None:
            found[fqn] = "bias of a router"
    for pattern in named:
        chosen = [fqn for fqn in floating if any(matches(pattern, part) for part in _enclosing(fqn))]
        found |= dict.fromkeys(chosen, f"`keep_fp32={pattern!r}`")
        if not chosen:
            near = difflib.get_close_matches(pattern, list(floating), n=3, cutoff=0.3) or list(floating)[:3]
            raise ValueError(
                f"`keep_fp32={pattern!r}` matches no parameter, buffer or module of the model; the nearest are:"
                f" {', '.join(map(repr, near))} (of {len(floating)}). Give part of an fqn ('teacher', 'mlp.gate') or a"
                " pattern ('*.norm')."
            )
    return found


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

        def declares(
            fqn: str,
            tensor: Tensor,
            always: Callable[[str], bool] = always,
            sometimes: Callable[[str], bool] = sometimes,
        ) -> str | None:
            own = fqn.replace("base_layer.", "")  # PEFT's wrapper of a layer: a declared "base" does not mean it
            if always(own):
                return "_keep_in_fp32_modules_strict"
            vector = tensor.ndim < 2 or dtype == torch.float16
            return "_keep_in_fp32_modules" if vector and sometimes(own) else None

        yield prefix, declares


def _enclosing(fqn: str) -> Iterator[str]:
    """Yield ``"a"``, ``"a.b"`` and ``"a.b.c"`` for ``"a.b.c"``."""
    return accumulate(fqn.split("."), "{}.{}".format)
