"""Optimizer-side parts of low precision: loss scaling."""

from lightning_lowprec.optim.loss_scale import LossScale, LossScaler

__all__ = ["LossScale", "LossScaler"]
