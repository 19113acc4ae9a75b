"""The state of a plugin in checkpoints: the loss scale, the backend, and the states of other plugins."""

from collections.abc import Mapping
from typing import Any, Final

from lightning_lowprec.messages import info
from lightning_lowprec.precision.loss_scale import LossScaler

SCALER_STATE: Final = "loss_scale"  # key of the loss scale in a plugin's state
BACKEND_STATE: Final = "backend"  # key of the backend's name in a plugin's state
SKIPS_STATE: Final = "skipped_steps"
"""Key of the number of skipped steps in the state of a plugin that does not scale the loss."""
LIGHTNINGS: Final = ("MixedPrecision", "FSDPPrecision")  # plugins of Lightning whose state has a loss scale


def load_loss_scale(scaler: LossScaler | None, state: Mapping[str, Any], precision: str) -> None:
    """Restore the loss scale from the state of our plugins or of Lightning's ``MixedPrecision`` (a GradScaler's).

    A precision that does not scale the loss drops the stored scale with a log line, and goes on counting skipped steps.
    """
    scales = scaler is not None and scaler.scales_loss
    if scaler is not None and not scales:
        scaler.skipped_steps = int(state.get(SKIPS_STATE, scaler.skipped_steps))
    stored = state.get(SCALER_STATE, state if "_growth_tracker" in state else None)
    if not stored:
        return
    if scaler is not None and scales:
        scaler.load_state_dict(stored)
    else:
        info(f"Dropped the loss scale of the checkpoint: `precision={precision!r}` needs none.")


def foreign_states(checkpoint: Mapping[str, Any], plugin: type, root: type) -> list[dict[str, Any]]:
    """Return the states of other plugins in a Trainer's checkpoint; none if the checkpoint has that of ``plugin``.

    States of all classes derived from ``root`` count. The key of a plugin's state is the name of its class.
    """
    if plugin.__qualname__ in checkpoint:
        return []
    below: list[type] = root.__subclasses__()
    for child in below:  # the list grows: children of children
        below += child.__subclasses__()
    states = [checkpoint.get(name) for name in (*LIGHTNINGS, *(cls.__qualname__ for cls in below))]
    return [state for state in states if isinstance(state, dict)]
