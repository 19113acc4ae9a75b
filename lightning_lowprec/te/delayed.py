"""The part of ``FP8TE`` that delayed scaling needs: its scales are state, which ranks share and checkpoints keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

SCALES: Final = "scales"
"""Key of the scales in a plugin's state."""
REUSED: Final = "weights_are_reused"
"""Key of whether a quantised weight is used again within a step: the amax of one that is, is seen once."""

Layers = list[tuple[str, Any]]
"""Names and modules of Transformer Engine."""


class DelayedScales:
    """The delayed scales of everything that a plugin has set up.

    Args:
        recipe: delayed scaling.
        layers: finds all of the plugin's layers; a walk over its modules, so it is asked when something is to be done.
    """

    def __init__(self, recipe: Any, layers: Callable[[], Layers]) -> None:
        self.recipe = recipe
        self.layers = layers
        self._loaded: Mapping[str, Any] = {}
        self._loaded_reuse = False
        self._unregistered = False

    def expect(self) -> None:
        """Layers have been converted, on a GPU: they are registered when they run for the first time."""
        self._unregistered = True

    def enter(self) -> None:
        """A forward begins, within Transformer Engine's autocast."""
        from lightning_lowprec.te import scales

        if self._unregistered:
            scales.register(self.layers())
            self._unregistered = False
        scales.renew_backward_scales_ourselves()

    def leave(self) -> None:
        """A forward ends, still within Transformer Engine's autocast, which then renews the scales it used."""
        from lightning_lowprec.te import scales

        if torch.is_grad_enabled():
            scales.drop_nonfinite(forward=True)

    def after_step(self) -> None:
        """An optimizer has stepped, or skipped its step."""
        from lightning_lowprec.te import scales

        scales.renew_backward_scales()

    def state(self) -> dict[str, Any]:
        """Plain tensors; empty before the first forward."""
        from lightning_lowprec.te import scales

        self.restore()  # those that were loaded and not used yet
        layers = self.layers()
        found = scales.saved(layers)
        return {SCALES: found, REUSED: any(cache.pays for cache in _caches(layers))} if found else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a plugin's state, for layers that may not be there yet."""
        self._loaded, self._loaded_reuse = dict(state.get(SCALES, {})), bool(state.get(REUSED, False))

    def restore(self) -> None:
        """Give layers what was loaded, if they are there."""
        layers = self.layers() if self._loaded else []
        if not layers:
            return
        from lightning_lowprec.te import scales

        left = scales.restore(layers, self._loaded, self.recipe)
        for cache in _caches(layers):
            cache.pays = self._loaded_reuse
        if left:
            rank_zero_info(f"No layer for {len(left)} of the checkpoint's delayed scales ({left[0]!r}, ...).")
        self._loaded = {}


def _caches(layers: Layers) -> list[Any]:
    found = (getattr(layer, "weight_cache", None) for _, layer in layers)
    return [cache for cache in found if cache is not None]
