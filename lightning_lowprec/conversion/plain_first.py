"""Layers that refuse, by name of the way out, the tools that know torch's own layers only.

    torch.export, torch.onnx.export       the forward of the layer asks (`transforms.check_call`)
    torch.jit.trace                       torch calls `_slow_forward` in place of the forward
    torch.jit.script                      torch calls `__prepare_scriptable__`
    torchao's `quantize_`                 sets another weight: `register_parameter`
    torch.ao.quantization                 sets `qconfig` on every module, and would skip the layer in silence

Nothing of this runs in a step.
"""

from typing import Any, Final, NoReturn, final

from torch import Tensor, nn

from lightning_lowprec.private.torch_modules import TracedModule
from lightning_lowprec.products.transforms import PLAIN_FIRST, check_call

_QUANTIZED: Final = ("torchao.quantization", "torchao.dtypes", "torchao.prototype")
"""Modules of the classes of tensors that torchao's ``quantize_`` puts in the place of weights."""


def _refuse(tool: str, layer: Any) -> NoReturn:
    raise RuntimeError(
        f"{tool} does not fit {type(layer).__name__}, a layer that a precision of lightning_lowprec has converted."
        f" {PLAIN_FIRST}."
    )


@final
class RefusedQConfig:
    """The attribute ``qconfig`` of a layer: it cannot be set. A descriptor, so that other attributes cost nothing."""

    def __get__(self, layer: object, owner: type | None = None) -> NoReturn:
        """Fail as for an attribute that is not there."""
        raise AttributeError("qconfig")

    def __set__(self, layer: object, value: Any) -> None:
        _refuse("`torch.ao.quantization`", layer)


class PlainFirst(TracedModule):
    """Abstract: a layer of a backend."""

    own_class: type[nn.Module]
    qconfig = RefusedQConfig()

    def plain_forward(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted."""
        output: Tensor = self.own_class.forward(self, input)
        return output

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Set a Parameter, as a module of torch does; refuse the weights of torchao's ``quantize_``."""
        if type(param).__module__.startswith(_QUANTIZED):
            _refuse(f"A weight of {type(param).__name__}, which torchao's `quantize_` sets,", self)
        nn.Module.register_parameter(self, name, param)

    def __prepare_scriptable__(self) -> NoReturn:
        _refuse("`torch.jit.script`", self)

    def check_trace(self) -> None:
        """Refuse ``torch.jit.trace`` where the layer computes in FP8."""
        if self.training or getattr(self, "fp8_eval", True):
            check_call(type(self).__name__)
