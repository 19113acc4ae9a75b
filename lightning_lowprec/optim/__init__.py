"""Optimizer-side parts of low precision without Lightning: loss scaling, master weights, MS-AMP's AdamW and SGD."""

from lightning_lowprec.optim.casting import cast_parameters
from lightning_lowprec.optim.loss_scale import LossScale, LossScaler
from lightning_lowprec.optim.master_book import MasterConfig
from lightning_lowprec.optim.masters import main_params, prepare_grads, refresh, without_masters, wrap
from lightning_lowprec.optim.scaled_adamw import ScaledAdamW
from lightning_lowprec.optim.scaled_sgd import ScaledSGD
from lightning_lowprec.optim.scaled_weight import scale_weight_, set_values_, values_of

__all__ = [
    "LossScale",
    "LossScaler",
    "MasterConfig",
    "ScaledAdamW",
    "ScaledSGD",
    "cast_parameters",
    "main_params",
    "prepare_grads",
    "refresh",
    "scale_weight_",
    "set_values_",
    "values_of",
    "without_masters",
    "wrap",
]
