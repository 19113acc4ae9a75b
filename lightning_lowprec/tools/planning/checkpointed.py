"""Let every block of a model be computed again in the backward, so that only its input is kept."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.fsdp2.options import blocks
from lightning_lowprec.private.transformers import is_model


def checkpoint_blocks(model: nn.Module) -> None:
    """Checkpoint the blocks of ``model`` in place: by its own switch in transformers, else the repeated blocks.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    of_transformers = [module for module in model.modules() if is_model(module)]
    for module in of_transformers:
        if getattr(module, "supports_gradient_checkpointing", False):
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
            return
    found = list(blocks(model).values())
    if not found:
        raise ValueError(
            f"`checkpointing=True` found no repeated blocks in {type(model).__name__} (children of one class in an"
            " nn.ModuleList or nn.Sequential). Checkpoint inside the model, and leave the option out."
        )
    for block in found:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
