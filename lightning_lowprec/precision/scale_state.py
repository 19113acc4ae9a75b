"""Where the loss scale goes: checkpoints and loggers."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import Trainer

from lightning_lowprec.precision.loss_scale import LossScaler

SCALER_STATE = "loss_scale"
"""Its key in a plugin's state."""


def stored_loss_scale(state: dict[str, Any]) -> dict[str, Any] | None:
    """The loss scale in our plugins' state, or in that of Lightning's MixedPrecision (a GradScaler's)."""
    found = state.get(SCALER_STATE, state if "_growth_tracker" in state else None)
    return found or None


def load_loss_scale(scaler: LossScaler | None, state: dict[str, Any], precision: str) -> None:
    """Restore the loss scale of a checkpoint; drop it, and say so, where nothing is scaled."""
    stored = stored_loss_scale(state)
    if stored is not None and scaler is not None:
        scaler.load_state_dict(stored)
    elif stored is not None:
        rank_zero_info(f"Dropped the loss scale of the checkpoint: `precision={precision!r}` needs none.")


def foreign_states(checkpoint: dict[str, Any], own: str) -> list[dict[str, Any]]:
    """What other plugins left in a Trainer's checkpoint that has nothing of the plugin class called ``own``."""
    names = ("MixedPrecision", "FSDPPrecision", "HalfMixed", "FP8TorchAO", "FP8TE", "MSAMP")
    states = [checkpoint.get(name) for name in names] if own not in checkpoint else []
    return [state for state in states if isinstance(state, dict)]


def log_loss_scale(scaler: LossScaler, trainer: Trainer) -> None:
    """Send ``loss_scale`` and ``skipped_steps`` to the user's loggers, as often as the Trainer sends its metrics."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # its logger connector sets it
    if not every or trainer.global_step % every:
        return
    for logger in trainer.loggers:
        metrics = {"loss_scale": scaler.scale, "skipped_steps": float(scaler.skipped_steps)}
        logger.log_metrics(metrics, step=trainer.global_step)
