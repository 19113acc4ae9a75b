"""A format of products: integers from -15 to 15, with a scale per row of what is multiplied (docs/architecture.md)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from lightning_lowprec.conversion import backends
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.products.formats import FORMATS, FormatSpec
from lightning_lowprec.torchao.plugin import SharedOptions, TorchAO


@dataclass(frozen=True)
class Int5(Arithmetic):
    """Integers from -15 to 15, summed in float32."""

    tokens: ClassVar[int] = 16

    def operand(self, matrix, role, dtype):
        return Steps(matrix.to(dtype))

    def multiply(self, a, b, dtype, product):
        (codes_a, step_a), (codes_b, step_b) = a, b
        with torch.autocast(codes_a.device.type, enabled=False):
            return ((codes_a @ codes_b.t()) * step_a * step_b.t()).to(dtype)


class Steps:
    """A matrix, whose codes are made along the dimension that a product sums over."""

    def __init__(self, matrix):
        self.matrix = matrix

    def rows(self):
        return codes_of(self.matrix)

    def columns(self):
        return codes_of(self.matrix.t())


def codes_of(rows):
    step = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 15
    return (rows / step).round(), step


FORMATS["int5"] = FormatSpec(
    precision="int5-mixed", title="int5", emulates=False, cpu="always", arithmetic=lambda emulate: Int5()
)


class Int5Mixed(TorchAO):
    """Linear layers in integers of five bits, everything else in bf16."""

    def __init__(self, recipe="int5", **options):
        super().__init__(recipe, ("int5",), SharedOptions(**options))

    def how(self, device):
        return f"int5 products by torch on {device}"


backends.register(
    backends.Backend(
        name="int5",
        title="int5",
        layers_from=(),  # the layers are those of torchao's room
        names={"int5-mixed": backends.PrecisionName(plugin_class=Int5Mixed, summary="integers of five bits")},
    )
)
