"""torchao's ``CPUOffloadOptimizer``, which copies gradients to CPU memory and steps copies of the parameters there.

It goes with float32 weights that are stepped with the gradients of the backward pass as they are. Masters, loss scaling
and clipping would see the copies, or change gradients that were copied before. FSDP2 offloads too, on one device as
well, and goes with all of them.
"""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_lowprec.private.torchao import parameters_of_copies


def refuse_copies(optimizer: Optimizer, what: str) -> None:
    """Raise if ``optimizer`` steps copies of the parameters.

    Args:
        optimizer: any optimizer.
        what: what it does not go with, and why: the middle of the message.

    Raises:
        TypeError: ``optimizer`` is torchao's ``CPUOffloadOptimizer``.
    """
    if parameters_of_copies(optimizer) is not None:
        raise TypeError(
            f"`{type(optimizer).__name__}` of torchao does not go with {what}. Use"
            " `strategy=FSDP2Strategy(cpu_offload=True)`, on one device too, or a precision with float32 weights and"
            " without loss scaling, such as 'bf16-mixed', 'half-auto' or 'fp8-hybrid'."
        )
