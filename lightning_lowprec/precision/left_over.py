"""Warn when layers or weights of this package are left in a model that runs under another precision.

Lightning's own precisions do not look at the layers of a model, so FP8 layers stay FP8 there. The warning comes from a
hook that runs once, at the first forward, and is removed; under our precisions there is no hook.
"""

from __future__ import annotations

from typing import Any, Final, final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.head import LossHead
from lightning_lowprec.masters.in_backward import forget_updates
from lightning_lowprec.masters.weights import is_marked
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch_modules import is_compiled

_ATTRIBUTE: Final = "warns_at_first_forward"
"""Attribute of a layer with the hook, which a copy of the layer has too."""
REMEDY: Final = (
    "Give the model torch's layers and float32 weights back before, by `lightning_lowprec.plain(model)`; or load its"
    " state dict, which is plain, into a fresh model; or use a precision of lightning_lowprec, which sets the model up"
    " anew"
)


@final
class Warn:
    """A forward pre-hook of several layers that warns once, whichever layer runs first, and removes itself.

    Args:
        message: the warning.
    """

    def __init__(self, message: str) -> None:
        self.message = message
        self.handles: list[RemovableHandle] = []

    def __call__(self, module: Module, args: Any) -> None:
        """Warn, and remove the hook from all layers."""
        if not torch.compiler.is_compiling():
            self.remove()
            rank_zero_warn(self.message)

    def remove(self) -> None:
        """Remove the hook from all layers."""
        for handle in self.handles:
            handle.remove()


def warn_at_first_forward(model: Module, run: str) -> None:
    """Let the layers that a backend has left in ``model`` warn at the first forward; at once if they are compiled.

    Args:
        model: may have such layers.
        run: how the model runs, for the message: ``"under `precision='32-true'`"``.
    """
    forget(model)
    layers = [
        m for m in model.modules() if backends.owner(m) is not None or (isinstance(m, LossHead) and m.kind == "fp8")
    ]
    if not layers:
        return
    titles = {"`head='fp8'`" if (owner := backends.owner(layer)) is None else owner.title for layer in layers}
    warn = Warn(
        f"{len(layers)} layers of {type(model).__name__} are those of {' and '.join(sorted(titles))}, from an earlier"
        f" set-up. They still compute in low precision, and here the model runs {run}. {REMEDY}."
    )
    if any(map(is_compiled, model.modules())):  # compiled code may not run the hook
        warn(model, ())
        return
    for layer in layers:
        warn.handles.append(layer.register_forward_pre_hook(warn))
        vars(layer)[_ATTRIBUTE] = warn


def warn_of_half_weights(model: Module, run: str) -> None:
    """Warn of trainable weights that masters have left in half precision: here they would train without masters."""
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in HALF_DTYPES and is_marked(p)]
    if half:
        rank_zero_warn(
            f"{len(half)} parameters of {type(model).__name__} are {half[0].dtype} since an earlier run with master"
            f" weights. The model runs {run}, where they train without masters and lose small updates. Make them"
            " float32 before, by `lightning_lowprec.plain(model)`; or use a precision of lightning_lowprec. Both take"
            " the exact values of the masters while their optimizer exists."
        )


def forget(model: Module) -> None:
    """Remove what an earlier run has left: updates in the backward pass, notes, :func:`warn_at_first_forward`."""
    forget_updates(model.parameters())
    for module in model.modules():
        backends.left_roundings.pop(module, None)
        warn = vars(module).pop(_ATTRIBUTE, None)
        if warn is not None:
            warn.remove()
