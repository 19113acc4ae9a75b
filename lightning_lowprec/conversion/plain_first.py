"""Layers that refuse, by name of the way out, the tools that know torch's own layers only.

    torch.export, torch.onnx.export       the forward of the layer asks (`transforms.check_call`)
    torch.jit.trace                       torch calls `_slow_forward` in place of the forward
    torch.jit.script                      torch calls `__prepare_scriptable__`

Nothing of this runs in a step.
"""

from typing import NoReturn

import torch
from torch import Tensor, nn

from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.private.torch_modules import TracedModule
from lightning_lowprec.products.transforms import PLAIN_FIRST, check_call


class PlainFirst(TracedModule):
    """Abstract: a layer of a backend."""

    own_class: type[nn.Module]

    def plain_forward(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted."""
        output: Tensor = self.own_class.forward(self, input)
        return output

    def declared_forward(self, input: Tensor) -> Tensor:
        """Compute in the dtype of the input, as the program declares (:mod:`~lightning_lowprec.conversion.declared`).

        torch refuses a half-precision weight beside a float32 input.
        """
        half = input.dtype in HALF_DTYPES
        with torch.autocast(input.device.type, input.dtype if half else None, enabled=half):
            return self.plain_forward(input)

    def __prepare_scriptable__(self) -> NoReturn:
        raise RuntimeError(
            f"`torch.jit.script` does not fit {type(self).__name__}, a layer that a precision of lightning_lowprec has"
            f" converted. {PLAIN_FIRST}."
        )

    def check_trace(self) -> None:
        """Refuse ``torch.jit.trace`` where the layer computes in FP8."""
        if self.training or getattr(self, "fp8_eval", True):
            check_call(type(self).__name__)
