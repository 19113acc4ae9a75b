"""Sharding models that compute in low precision, and what goes over the wire."""

from lightning_lowprec.distributed.fp8_gradients import fp8_gradient_hook

__all__ = ["fp8_gradient_hook"]
