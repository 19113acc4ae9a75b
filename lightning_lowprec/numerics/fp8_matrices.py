"""Matrices as float8 codes with one scale, in the layouts of two products; FP8 kernels, or their emulation.

``torch._scaled_mm`` wants the first factor row by row and the second one column by column ("TN"), and dimensions that
are multiples of 16. So a matrix that is a factor of two products is stored twice: as codes, and as transposed codes.

For a large weight on CUDA, of the head or of a layer, one kernel writes both layouts. The scale needs the largest
absolute value first, for which the whole weight is read, unless the optimizer's kernel has noted this value
(:class:`Largest`). Then one pass encodes and measures, and a second launch encodes again where the note was wrong: the
codes are always those of the weight.

No library writes both layouts in one pass, and none knows the note. The ledger counts 10.9 GB for an FP8 head with
float32 weights, and 12.4 GB with compiled casts in place of this kernel; with bf16 weights 8.77 and 8.81. Per block of
the 8B-shaped stack it counts 10.83 in place of 11.70, and with noted values 7.14 in place of 8.01.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from lightning_lowprec.numerics import one_pass, tensor_cores
from lightning_lowprec.numerics.formats import E4M3, decode, encode, visible_scale
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT, check_operands
from lightning_lowprec.private.torch import largest_absolute_values, scaled_product, version_of

DEVICES = {"cuda"}
FastAccum = Literal["forward", "all", "none"]
"""The GEMMs that may add up with fewer bits than float32."""
_NOTE: Final = "lowprec_largest"
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]


@final
@dataclass(frozen=True, kw_only=True)
class TwoLayouts:
    """A matrix as float8 codes, (M, N), the transposed codes, (N, M), and the reciprocal of their scale, () float32."""

    rows: Tensor
    columns: Tensor
    inv_scale: Tensor

    @classmethod
    def of(cls, values: Tensor) -> "TwoLayouts":
        """Encode a matrix to e4m3 by the scale of its amax; rows and columns of zeros fill it up to multiples of 16.

        values: (M, N) any float, with any strides. With inf or NaN among them the scale is NaN, and so are products.
        """
        if isinstance(values, Parameter) and kernel_encodes(values):
            rows, columns, _, inverse = weight_codes(values.detach(), largest(values), visible=True)
            return cls(rows=rows, columns=columns, inv_scale=inverse)
        scale = visible_scale(largest_absolute_values([values])[0])
        rows = padded(one_pass.in_one_pass(encode, values, scale, E4M3.dtype)).contiguous()
        return cls(rows=rows, columns=transposed(rows), inv_scale=scale.reciprocal())


def padded(codes: Tensor) -> Tensor:
    """(M, N) any dtype -> (M', N'), filled up with zeros to the next multiples of 16."""
    missing = [-size % ALIGNMENT for size in codes.shape]
    if not any(missing):
        return codes
    bits = codes.view(torch.uint8) if codes.element_size() == 1 else codes  # torch pads no float8
    return F.pad(bits, (0, missing[1], 0, missing[0])).view(codes.dtype)


def transposed(codes: Tensor, out: Tensor | None = None) -> Tensor:
    """(M, N) float8 -> (N, M) float8, contiguous, or written into ``out``: (N, M), columns of a larger matrix."""
    if out is None:
        out = torch.empty(codes.shape[::-1], dtype=codes.dtype, device=codes.device)
    one_pass.rows_in_one_pass(_transpose_into, codes.view(torch.uint8), out.view(torch.uint8))
    return out


def _transpose_into(codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.t())


def product(
    a: Tensor,
    b: Tensor,
    inv_scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    fast: bool,
    emulate: tensor_cores.Emulation,
) -> Tensor:
    """[M, K] @ [K, N] -> [M, N] in ``dtype``, accumulated in float32, or as ``emulate`` says.

    ``a`` is contiguous, ``b`` lies in memory column by column. ``dtype`` is float32 or bfloat16; where FP8 is emulated,
    any. ``fast``: whether the kernel may accumulate with fewer bits.
    """
    if not emulate:
        return scaled_product(a, b, *inv_scales, dtype, fast=fast)
    if emulate is not True:
        return tensor_cores.scaled_product(a, b, *inv_scales, dtype, fast=fast, on=emulate)
    check_operands(a, b)
    with torch.autocast(a.device.type, enabled=False):
        return ((decode(a) @ decode(b)) * (inv_scales[0] * inv_scales[1])).to(dtype)


# ---- a weight in two layouts by one kernel


def kernel_encodes(weight: Tensor) -> bool:
    """Return whether the kernel takes this weight."""
    return _is_fit(weight) and weight.data_ptr() % ALIGNMENT == 0


def _is_fit(weight: Tensor) -> bool:
    return (
        weight.device.type in DEVICES
        and weight.dtype in _DTYPES
        and weight.is_contiguous()
        and all(size % ALIGNMENT == 0 for size in weight.shape)
        and one_pass.kernels_run()
    )


def weight_codes(weight: Tensor, hint: Tensor | None, *, visible: bool) -> FourTensors:
    """Return the codes of a weight, (N, K), the transposed codes, (K, N), their scale and its reciprocal, () float32.

    ``hint``, () float32, is what the largest absolute value probably is. ``visible``: whether the scale is that of
    `visible_scale` or torchao's of `largest_scale`.
    """
    return _empty_codes(weight) if one_pass.is_simulated() else launch(weight, hint, visible)


def _empty_codes(weight: Tensor, hint: Tensor | None = None) -> FourTensors:
    rows = torch.empty(weight.shape, dtype=E4M3.dtype, device=weight.device)
    scale = torch.empty((), device=weight.device)
    return rows, rows.new_empty(weight.shape[::-1]), scale, torch.empty_like(scale)


def launch(weight: Tensor, hint: Tensor | None, visible: bool) -> FourTensors:
    """Launch the kernel; see :func:`~lightning_lowprec.numerics.kernels.both_layouts`."""
    from lightning_lowprec.numerics import kernels

    with one_pass.on_device(weight.device):
        rows, columns, scale, inverse = kernels.both_layouts(weight, hint, visible)
    return rows.view(E4M3.dtype), columns.view(E4M3.dtype), scale, inverse


# ---- a weight of a layer, in eager and in compiled code

LARGE: Final = 1 << 22
"""Values of a weight from which on the kernel encodes it: smaller ones move few bytes."""
_SIMULATED: Final = "lightning_lowprec::both_layouts"
torch.library.define(_SIMULATED, "(Tensor weight, Tensor? hint) -> (Tensor, Tensor, Tensor, Tensor)")
torch.library.register_fake(_SIMULATED, _empty_codes)


def is_laid_out(weight: Tensor) -> bool:
    """Return whether :func:`both_layouts` takes a large weight; what a compiler shows has no address."""
    if weight.is_cuda and not one_pass.compiles(weight.device):  # Triton has no float8_e4m3fn there
        return False
    return _is_fit(weight) if type(weight) not in (Tensor, Parameter) else kernel_encodes(weight)


def both_layouts(weight: Tensor, hint: Tensor | None) -> FourTensors:
    """Return :func:`weight_codes` of (N, K) float by torchao's scale; a compiler launches the kernel itself."""
    if type(weight) in (Tensor, Parameter):
        return weight_codes(weight.detach(), hint, visible=False)
    if one_pass.is_simulated():
        codes: FourTensors = torch.ops.lightning_lowprec.both_layouts(weight, hint)
    else:
        from lightning_lowprec.numerics import kernels

        codes = kernels.traced_layouts(weight, hint)
    return codes


# ---- the largest absolute value of a weight, noted by the optimizer's kernel that wrote the weight


@final
class Largest:
    """The hint of one weight. A write that nobody sees makes it wrong: code that uses it compares it."""

    made: ClassVar[int] = 0
    """How many hints were asked for so far."""

    def __init__(self, weight: Tensor) -> None:
        Largest.made += 1
        self.value = torch.zeros((), device=weight.device)
        """() float32, not negative or NaN."""
        self._version = -1

    def note(self, weight: Tensor) -> None:
        """Note that ``value`` is that of ``weight`` now."""
        self._version = version_of(weight)

    def holds_for(self, weight: Tensor) -> bool:
        """Return whether no write to ``weight`` was seen since :meth:`note`."""
        return self._version == version_of(weight)

    def __reduce__(self) -> tuple[object, ...]:
        """Leave the hint out of copies and pickles."""
        return type(None), ()


def ask(weight: Tensor) -> None:
    """Ask for a hint of a weight, which :func:`answer` makes once the weight is where it trains."""
    if weight.numel() >= LARGE:
        vars(weight).setdefault(_NOTE, None)


def answer(weight: Tensor) -> None:
    """Make the hint of a weight for which somebody has asked."""
    if type(weight) is Parameter and _NOTE in vars(weight):  # no shard of FSDP2
        setattr(weight, _NOTE, Largest(weight))


def hint_of(weight: Tensor) -> Tensor | None:
    """Return the hint of a weight, () float32, if there is one on its device. A compiler reads this function."""
    hint: Largest | None = getattr(weight, _NOTE, None)
    return None if hint is None or hint.value.device != weight.device else hint.value


def asked(weight: Tensor) -> Largest | None:
    """Return the hint that a kernel is to write, if somebody has asked for it."""
    hint: Largest | None = vars(weight).get(_NOTE)
    return hint if hint is not None and hint.value.device == weight.device else None


def largest(weight: Tensor) -> Tensor | None:
    """Return the hint of a weight, () float32, or None if there is none; ask for it from now on."""
    hint = asked(weight)
    if hint is None:
        setattr(weight, _NOTE, Largest(weight))
        return None
    return hint.value if hint.holds_for(weight) else None
