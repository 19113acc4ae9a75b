"""What a CustomRecipe of the user's may ask for.

Its function is called with the role of every tensor of every layer (``role.module_type``, ``role.tensor_type``,
``role.name``) and returns a quantizer, or a request for one that Transformer Engine keeps state for.

Importing this module imports Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformer_engine.pytorch.quantization import QuantizerRequest, QuantizerRole


def check(layers: Iterable[tuple[str, Any]], recipe: Any) -> None:
    """Refuse quantizers with a history: their scales would neither be saved, nor renewed, nor restored to recompute.

    Args:
        layers: the fqns and the layers of Transformer Engine.
        recipe: a CustomRecipe. Its function is called for every role, as the first forward will do again.

    Raises:
        ValueError: it returned a request (``DelayedScalingRequest``).
    """
    for fqn, layer in layers:
        for role in _roles(layer):
            made = recipe.qfactory(role)
            if isinstance(made, QuantizerRequest):
                raise ValueError(
                    f"The `qfactory` of the CustomRecipe returns a {type(made).__name__} for {fqn!r} ({role}): scales"
                    " with a history are kept for `FP8TE('delayed')` only. Use that, or return a quantizer that scales"
                    " by the tensor at hand (`current_scaling_factory` of Transformer Engine's custom recipes)."
                )


def _roles(layer: Any) -> list[Any]:
    """Of two GEMMs, the most that a layer has before they repeat: input, weight, output; grad_output, grad_input."""
    found: list[Any] = []
    for forward, each in ((True, 3), (False, 2)):
        roles = layer.get_quantizer_roles(fwd=forward, num_quantizers=2 * each)
        found += [QuantizerRole()] if roles is None else roles
    return list(dict.fromkeys(found))
