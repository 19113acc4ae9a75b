"""The MS-AMP backend: weights, gradients and optimizer state in 8 and 16 bits, with scales (arXiv 2310.18313)."""

from lightning_lowprec.msamp.adamw_sgd import ScaledAdamW, ScaledSGD
from lightning_lowprec.msamp.linear import scale_linears
from lightning_lowprec.msamp.weight import scale_weight_, set_values_, values_of

__all__ = ["ScaledAdamW", "ScaledSGD", "scale_linears", "scale_weight_", "set_values_", "values_of"]
