"""Faults of numerics, each one small change of the package, and the tests that must see it.

A fault names text of the package, wherever that text stands: moving code to another file breaks nothing here.
"""

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_lowprec"


@dataclass(frozen=True)
class Fault:
    """One change."""

    effect: str
    """What becomes wrong."""
    old: str
    """Text that stands once in the package."""
    new: str
    seen_by: str
    """Test files that fail with the fault, separated by spaces."""

    def file(self) -> Path:
        """The file of the package that has the text.

        Raises:
            LookupError: the text stands nowhere, or more than once.
        """
        files = [path for path in sorted(PACKAGE.rglob("*.py")) if self.old in path.read_text()]
        if len(files) != 1 or files[0].read_text().count(self.old) != 1:
            raise LookupError(
                f"{self.effect}: its text stands in {[path.name for path in files]}; expected once:\n{self.old}"
            )
        return files[0]


FAULTS = [
    # ---- codes and scales
    Fault(
        "a scale that is off by 2",
        "(torch.finfo(dtype).max / amax.to(torch.float64)",
        "(2 * torch.finfo(dtype).max / amax.to(torch.float64)",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "a scale of the smallest value",
        "coding.scales(torch.amax(torch.abs(matrix), dim=along",
        "coding.scales(torch.amin(torch.abs(matrix), dim=along",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "powers of two rounded up",
        ".to(torch.float32)\n    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale",
        ".to(torch.float32)\n    return torch.exp2(torch.ceil(torch.log2(scale))) if power_of_2 else scale",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "codes cut at half of the largest value",
        "(values.float() * scale).clamp(-limit, limit).to(dtype)",
        "(values.float() * scale).clamp(-limit / 2, limit / 2).to(dtype)",
        "tests/numerics/test_scaling.py",
    ),
    Fault(
        "rounding toward zero",
        "    return (values.float() * scale).clamp(-limit, limit).to(dtype)",
        "    codes = (values.float() * scale).clamp(-limit, limit)\n"
        "    return (codes.view(torch.int32) & -0x100000).view(torch.float32).to(dtype)",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "a power of two that lets the largest value overflow",
        "- (mantissa > limit_mantissa).to(exponent.dtype)",
        "+ (mantissa > limit_mantissa).to(exponent.dtype)",
        "tests/numerics/test_scaling.py",
    ),
    Fault(
        "inf that becomes the largest value",
        "torch.where(x.isinf(), x if format.has_inf else torch.nan, finite)",
        "finite",
        "tests/numerics/test_scaling.py",
    ),
    Fault(
        "a NaN that hides in a maximum",
        "torch.where(amaxes.isfinite(), amaxes, torch.inf)",
        "amaxes.nan_to_num(0.0)",
        "tests/numerics/test_fp8_average.py",
    ),
    # ---- the three products
    Fault(
        "grad_weight of transposed operands",
        "a, b = (x, grad) if by.in_by_out else (grad, x)",
        "a, b = (x, grad) if not by.in_by_out else (grad, x)",
        "tests/torchao/test_mixed_gemms.py",
    ),
    Fault(
        "rows in place of columns for grad_input",
        "codes = w.rows() if by.in_by_out else w.columns()",
        "codes = w.columns() if by.in_by_out else w.rows()",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "a bias that is lost",
        "output = cut_rows(output if bias is None else output + bias, input)",
        "output = cut_rows(output, input)",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "padding that reaches the output",
        "output[:tokens].reshape(",
        "output[-tokens:].reshape(",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "padding with ones",
        "torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing",
        "torch.nn.functional.pad(rows, (0, 0, 0, missing), value=1.0) if missing",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "a gradient of a bias that is averaged",
        "g.sum(0) if ctx.has_bias and to_bias",
        "g.mean(0) if ctx.has_bias and to_bias",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "a scale that divides in place of multiplying",
        "(decode(rows) / scale_a, decode(columns) / scale_b)",
        "(decode(rows) / scale_a, decode(columns) * scale_b)",
        "tests/torchao/test_fp8_linear.py",
    ),
    Fault(
        "int8 scales of the other operand",
        "scales = a.scale.view(-1, 1), b.scale.view(1, -1)",
        "scales = b.scale.flip(0)[: len(a.scale)].view(-1, 1), b.scale.view(1, -1)",
        "tests/torchao/test_prototypes.py",
    ),
    # ---- experts
    Fault(
        "experts that use the scale of the group before",
        "group.clamp(max=ends.shape[0] - 1)",
        "(group - 1).clamp(min=0, max=ends.shape[0] - 1)",
        "tests/torchao/test_experts.py",
    ),
    Fault(
        "columns of experts that share a scale across groups",
        "encode(rows, scale[group], E4M3.dtype)",
        "encode(rows, scale[group * 0], E4M3.dtype)",
        "tests/torchao/test_experts.py",
    ),
    # ---- the head and the loss
    Fault(
        "ignored tokens that count",
        "factors = torch.where(target != ignore_index, factors, 0.0)",
        "factors = torch.where(target != ignore_index, factors, factors)",
        "tests/test_losses.py",
    ),
    Fault(
        "label smoothing left out of the gradient",
        "gradient = gradient - label_smoothing / x.shape[-1]",
        "gradient = gradient",
        "tests/test_losses.py",
    ),
    Fault(
        "a chunk of the head's gradient that overwrites the others",
        "beta=0 if first else 1",
        "beta=0",
        "tests/test_losses.py",
    ),
    # ---- masters and moments
    Fault(
        "a lost remainder",
        "remainder.copy_(bits)  # int32",
        "remainder.zero_()  # int32",
        "tests/numerics/test_masters_rounding.py",
    ),
    Fault(
        "masters rounded toward zero",
        "bits.add_(_HALF).bitwise_and_(_UPPER)",
        "bits.bitwise_and_(_UPPER)",
        "tests/numerics/test_masters_rounding.py",
    ),
    Fault(
        "stochastic rounding with equal bits in every step",
        "random_bits(part.numel(), seed, step, chunk, flat.device, first)",
        "random_bits(part.numel(), seed, 0, chunk, flat.device, first)",
        "tests/numerics/test_masters_rounding.py",
    ),
    Fault(
        "biased stochastic rounding",
        "bitwise_and_(_LOWER)\n\n\ndef bits_of_positions",
        "bitwise_and_(_LOWER >> 1)\n\n\ndef bits_of_positions",
        "tests/numerics/test_masters_rounding.py",
    ),
    Fault(
        "a master that does not follow an edit",
        "if now != saved:",
        "if False:",
        "tests/masters/test_masters_lifecycle.py",
    ),
    Fault(
        "an accumulated gradient that is overwritten",
        "grad if master.grad is None else master.grad + grad",
        "grad",
        "tests/masters/test_masters_gradients.py",
    ),
    Fault(
        "8-bit moments without a sign",
        "codes = codes | ((values.view(torch.int32) >> 24) & 0x80)",
        "codes = codes | 0",
        "tests/numerics/test_scaling.py",
    ),
    Fault(
        "a block of moments with the exponent of another",
        "_powers(2 * _BIAS - exponents)[:, None]",
        "_powers(2 * _BIAS - exponents.roll(1))[:, None]",
        "tests/numerics/test_scaling.py",
    ),
    # ---- loss scaling
    Fault(
        "a gradient that stays scaled",
        "inv_scale = 1.0 / self.scale",
        "inv_scale = 1.0",
        "tests/precision/test_loss_scale.py",
    ),
    Fault(
        "a scale that grows after overflows",
        "max(self.scale * self.config.backoff_factor, self.config.floor)",
        "max(self.scale / self.config.backoff_factor, self.config.floor)",
        "tests/precision/test_loss_scale.py",
    ),
    Fault(
        "a step with inf that is made",
        "output = None if skip else optimizer.step(**kwargs)",
        "output = optimizer.step(**kwargs)",
        "tests/precision/test_loss_scale.py",
    ),
    Fault(
        "gradients of a resumed accumulation with an old scale",
        "_multiply_grads(optimizer, self.scale / old)",
        "_multiply_grads(optimizer, 1.0)",
        "tests/precision/test_loss_scale.py",
    ),
    # ---- MS-AMP
    Fault(
        "weights of MS-AMP in e5m2",
        "codes, new_scale = encode(stored.float() / scale, E4M3)",
        "codes, new_scale = encode(stored.float() / scale, E5M2)",
        "tests/msamp/test_scaled_linear.py",
    ),
    Fault(
        "gradients of MS-AMP in e4m3",
        "return _both(values, E5M2, rows, columns)",
        "return _both(values, E4M3, rows, columns)",
        "tests/msamp/test_scaled_linear.py",
    ),
    Fault(
        "an inverse scale in place of a scale",
        '"""Return the values: (...) float32."""\n        return self.codes.float() * self.inv_scale',
        '"""Return the values: (...) float32."""\n        return self.codes.float() / self.inv_scale',
        "tests/msamp/test_scaled_linear.py",
    ),
    Fault(
        "a second moment without its correction",
        "torch.div(exp_avg_sq, correction2, out=grad)",
        "grad.copy_(exp_avg_sq)",
        "tests/msamp/test_scaled_adamw.py",
    ),
    Fault(
        "a gradient that is accumulated with the scale of the first",
        "other.float() * other_inv_scale)",
        "other.float() * inv_scale)",
        "tests/msamp/test_scaled_linear.py",
    ),
    Fault(
        "gradients of MS-AMP that are not averaged over ranks",
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)\n    stages",
        "largest.zero_()\n    stages",
        "tests/msamp/test_msamp_ddp.py",
    ),
    # ---- over ranks
    Fault(
        "a skipped all-reduce of the largest values",
        "dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)\n    ranks",
        "ranks",
        "tests/numerics/test_fp8_average.py",
    ),
    Fault(
        "a sum in place of a mean over ranks",
        ".sum(0).div_(codes.shape[0])",
        ".sum(0)",
        "tests/numerics/test_fp8_average.py",
    ),
    Fault(
        "a shard whose write is not noticed",
        "        self._scales.stale = True\n",
        "",
        "tests/fsdp2/test_fsdp2_codes.py",
    ),
    Fault(
        "a scale of this rank's shard alone",
        "dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())\n            scale",
        "scale",
        "tests/fsdp2/test_fsdp2_codes.py",
    ),
    Fault(
        "a sum of a tensor core that keeps one bit more",
        "-(1 << (52 - unit.kept))",
        "-(1 << (51 - unit.kept))",
        "tests/numerics/test_tensor_cores.py",
    ),
    Fault(
        "a tensor core that promotes with fast accumulation",
        "promoted=0 if fast else unit.promoted",
        "promoted=unit.promoted",
        "tests/precision/test_emulation.py",
    ),
    # ---- files
    Fault(
        "exported codes with scales in place of inverse scales",
        "yield target.name + self.format.scales, grid.reciprocal()\n",
        "yield target.name + self.format.scales, grid\n",
        "tests/serving/test_formats.py",
    ),
    Fault(
        "blocks of an exported weight with the scale of others",
        "columns).amax((1, 3))",
        "columns).amax((1, 3)).roll(1, 0)",
        "tests/torchao/test_block.py",
    ),
]
