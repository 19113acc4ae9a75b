"""The state of a plugin in checkpoints: the loss scale, the backend, and the states of other plugins."""

from collections.abc import Mapping
from typing import Any, Final

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.name_suffixes import split
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
        rank_zero_info(f"Dropped the loss scale of the checkpoint: `precision={precision!r}` needs none.")


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


# ---- a name without a backend, such as fp8-hybrid, must mean one backend on all ranks and after a resume


def check_ranks_agree(precision: str, backend: str) -> None:
    """Raise if ``precision`` means different backends on different ranks. Every rank must call this."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    chosen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(chosen, backend)
    if len(set(chosen)) > 1:
        ranks = {name: [rank for rank, other in enumerate(chosen) if other == name] for name in dict.fromkeys(chosen)}
        said = " and ".join(f"{name} on ranks {', '.join(map(str, ranks[name]))}" for name in ranks)
        raise RuntimeError(
            f"`precision={precision!r}` means {said}, since they have different GPUs or packages. Say which:"
            f" {pinned(precision, *ranks)}."
        )


def check_backend(plugin: Any, state: Mapping[str, Any]) -> None:
    """Raise if a plugin whose backend was chosen for a name loads the state of another backend of this name.

    A backend that the name never means, such as MS-AMP for fp8-hybrid, is a change of precision, which may be.
    """
    precision, backend = plugin.precision, plugin.backend
    if not plugin.backend_is_chosen or backend is None:
        return
    stored = state.get(BACKEND_STATE, backend)
    known = {other.name: f"{split(precision)[0]}{other.suffix}" in other.names for other in backends.registered()}
    if stored != backend and known.get(stored, True):  # the name means a backend that is not known here, perhaps
        raise RuntimeError(
            f"The checkpoint was trained by {stored}, and here `precision={precision!r}` means {backend}. To go on with"
            f" {stored}, use {pinned(precision, stored)}; to change over, {pinned(precision, backend)}."
        )


def pinned(precision: str, *names: str) -> str:
    """Return the names of ``precision`` that pin these backends: ``"'fp8-hybrid-te' or 'fp8-hybrid-torchao'"``."""
    stem, suffix = split(precision)
    suffixes = {backend.name: backend.suffix for backend in backends.registered()}
    return " or ".join(f"'{stem}{suffixes.get(name, f'-{name}')}{suffix}'" for name in names)
