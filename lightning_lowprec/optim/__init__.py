"""Optimizer-side parts of low precision, usable without Lightning: loss scaling, float32 master weights."""

from lightning_lowprec.optim.casting import cast_parameters
from lightning_lowprec.optim.loss_scale import LossScale, LossScaler
from lightning_lowprec.optim.master_book import MasterConfig
from lightning_lowprec.optim.masters import main_params, prepare_grads, refresh, without_masters, wrap

__all__ = [
    "LossScale",
    "LossScaler",
    "MasterConfig",
    "cast_parameters",
    "main_params",
    "prepare_grads",
    "refresh",
    "without_masters",
    "wrap",
]
