"""Replace the heads and losses of causal language models when a precision sets a model up."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module

from lightning_lowprec.conversion import head
from lightning_lowprec.hardware import caution, refusal
from lightning_lowprec.precision.options import Head


def replace_heads(plugin: Any, module: Module, device: torch.device) -> None:
    """Replace the heads and losses of the causal models in ``module``, in place, as the option ``head`` says.

    Args:
        plugin: the precision; FP8 is emulated as its option ``emulate`` says, if it has one.
        module: to be set up.
        device: the device that the module will run on.

    Raises:
        RuntimeError: the device has no FP8.
        ValueError: the module holds no causal model of ``transformers`` that is recognised exactly.
    """
    kind: Head = plugin.head
    if kind == "bf16":
        return
    emulate = getattr(plugin, "emulate", None)
    if kind == "fp8" and not emulate:
        if (reason := refusal("fp8-head", device)) is not None:
            raise RuntimeError(f"`head='fp8'` cannot run: {reason}. Use `head='chunked'`.")
        if (doubt := caution("fp8-head", device)) is not None:
            rank_zero_warn(f"`head='fp8'`: {doubt}.")
    fqns = head.replace(module, kind, emulate=emulate)
    where = ", ".join(repr(fqn) if fqn else type(module).__name__ for fqn in fqns)
    rank_zero_info(
        f"{plugin.precision}: head={kind!r} computes the loss of {where} from hidden states, without all logits."
    )
