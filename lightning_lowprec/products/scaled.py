"""Float8 codes with a scale per matrix or per row: the arithmetic of torchao's recipes, bit for bit.

    scale = largest / amax(values)              # of a matrix, or of each row, or of each column
    codes = round(clamp(values * scale))        # float8_e4m3fn: largest 448; float8_e5m2: largest 57344
    product = (codes_a @ codes_b.T) / (scale_a * scale_b)

Formulas, order of operations and flags of the kernel are those of torchao's ``Float8Linear``, which the tests run
beside this file. torchao encodes a weight in the forward and again in the backward; with one scale once is enough.

Kernels for float8 take the first operand in rows and the second in columns, so codes of both layouts are written. An
emulated product divides the codes by their scales and multiplies in float32, or takes the kernel's steps with the sums
of a named GPU (:mod:`~lightning_lowprec.numerics.tensor_cores`).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor

from lightning_lowprec.numerics import fp8_matrices, tensor_cores
from lightning_lowprec.numerics.formats import E4M3, decode, encode
from lightning_lowprec.numerics.kernel_operands import check_operands
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.private.torch import scaled_product
from lightning_lowprec.products.arithmetic import Codes, Coding, Operand, Product, Role, Transposable


@final
@dataclass(frozen=True, kw_only=True)
class Scaled(Transposable):
    """Float8 codes, with a scale per matrix or per row for each role."""

    input: Coding
    weight: Coding
    gradient: Coding
    emulate: tensor_cores.Emulation
    fast: bool = False
    """Whether the kernel may sum with fewer bits, as torchao's forward does.

    With scales per row it scales before it rounds to bf16 then, else after, as torchao does: kernels that scale rows
    are slow without it. With powers of two both give the same values.
    """
    tokens: ClassVar[int] = 16

    def operand(self, matrix: Tensor, role: Role, dtype: torch.dtype) -> Operand:
        """Return an operand."""
        return _operand(matrix, getattr(self, role))

    def coding(self, role: Role) -> Coding | None:
        """Return the coding of a role with one scale."""
        coding: Coding = getattr(self, role)
        return None if coding.by_row else coding

    def encoded(self, weight: Tensor) -> Codes:
        """Return codes and scale of a weight with one scale."""
        codes: Codes = _operand(weight, self.weight).rows()
        return codes

    def both_layouts(self, weight: Tensor, hint: Tensor | None) -> tuple[Codes, Codes] | None:
        """Return both layouts of a large weight on CUDA whose scale is the kernel's."""
        if self.weight != Coding(dtype=E4M3.dtype) or not fp8_matrices.is_laid_out(weight):
            return None
        rows, columns, *scales = fp8_matrices.both_layouts(weight, hint)
        return Codes(rows, *scales), Codes(columns, *scales)

    def decode(self, codes: Tensor, scale: Tensor, first: int = 0) -> Tensor:
        """Return the values of codes with one scale, float32."""
        return decode(codes) / scale

    def weight_rounding(self) -> WeightRounding:
        """Return the rounding of weights."""
        coding = replace(self.weight, dtype=E4M3.dtype)  # servers read no other
        return WeightRounding(scale_per="row" if coding.by_row else "tensor", scale_of=coding.scales)

    def multiply(self, a: Codes, b: Codes, dtype: torch.dtype, product: Product) -> Tensor:
        """Return a product, [M, N] of ``dtype``; with scales per row it is rounded to bf16 on its way."""
        (rows, scale_a, inverse_a), (others, scale_b, inverse_b) = a, b
        columns, scale_b = others.t(), scale_b.t()
        if self.emulate is True:
            check_operands(rows, columns)
            with torch.autocast(rows.device.type, enabled=False):
                return torch.mm(decode(rows) / scale_a, decode(columns) / scale_b).to(dtype)
        multiply = partial(tensor_cores.scaled_product, on=self.emulate) if self.emulate else scaled_product
        inverse_a = scale_a.reciprocal() if inverse_a is None else inverse_a
        inverse_b = scale_b.reciprocal() if inverse_b is None else inverse_b
        if not (scale_a.ndim or scale_b.ndim):
            return multiply(rows, columns, inverse_a, inverse_b, dtype, fast=self.fast)
        if self.fast:
            inverse_a = inverse_a.expand(len(rows), 1).contiguous()  # one scale of two becomes one per row
            inverse_b = inverse_b.expand(1, len(others)).contiguous()
            return multiply(rows, columns, inverse_a, inverse_b, torch.bfloat16, fast=True).to(dtype)
        one = inverse_a.new_ones(())
        output = multiply(rows, columns, one, one, torch.bfloat16, fast=False)
        return output.mul_(inverse_a * inverse_b).to(dtype)


def _operand(matrix: Tensor, coding: Coding) -> Operand:
    """Return an operand that is encoded where it is used; one scale is computed once."""
    one = None if coding.by_row else coding.scales(torch.max(torch.abs(matrix)))

    def scales(along: int) -> Tensor:
        return coding.scales(torch.amax(torch.abs(matrix), dim=along, keepdim=True)) if one is None else one

    def rows() -> Codes:
        scale = scales(1)
        return Codes(_stored(encode(matrix, scale, coding.dtype).contiguous()), scale)

    def columns() -> Codes:
        scale = scales(0)
        codes = encode(matrix, scale, coding.dtype).t().contiguous()
        # codes of columns with scales of their own have one reader, and inductor fuses better without a view
        return Codes(codes if coding.by_row else _stored(codes), scale.t())

    return Operand(rows, columns)


def _stored(codes: Tensor) -> Tensor:
    """Return codes that inductor writes once and reads in several products; without a view it writes them for each."""
    return codes.as_strided(codes.shape, codes.stride())
