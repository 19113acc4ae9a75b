"""Delayed scaling: scales are state, which ranks share, checkpoints keep, and every step renews.

A layer has 3 scales forward (input, weight, output) and 2 backward (grad_output, grad_input), float32, and for each
scale the history of its amax: [amax_history_len, 3] and [amax_history_len, 2]. Transformer Engine makes them at the
first forward and registers them in buffers of the process:

    forward        notes the amax of inputs and weights   -> amax_history[0]
    autocast ends  reduces them over all ranks            -> scales of the next forward
    backward       notes the amax of gradients            -> amax_history[0]
    optimizer step reduces them over all ranks            -> scales of the next backward

Transformer Engine would renew the backward scales when the first layer runs backward. If that layer gets no backward
(its output is detached, or its branch unused), no backward scale would ever change; so :class:`DelayedScales` renews
them behind every optimizer step.

If a step may be skipped, the first forward after a step copies all scales and histories. A skipped step restores them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lightning_lowprec.messages import info
from lightning_lowprec.private import transformer_engine
from lightning_lowprec.private.torch import copy_all_
from lightning_lowprec.private.transformers import CHECKPOINT_FUNCTION

SCALES: Final = "scales"
"""Key of the scales in a plugin's state."""
_MODES: Final = ("forward", "backward")
_TENSORS: Final = ("scale", "amax_history")
Layers = Iterable[tuple[str, Any]]
"""Names and layers of Transformer Engine."""
LayerScales = dict[str, Tensor]
"""``{"forward.scale": ..., "forward.amax_history": ..., "backward.scale": ..., ...}``, on the CPU."""


@final
class DelayedScales:
    """The delayed scales of all models that a plugin has set up; ``layers`` walks over the models."""

    def __init__(self, recipe: object, layers: Callable[[], Layers], *, may_skip: bool = False) -> None:
        self.recipe = recipe
        self.layers = layers
        self._may_skip = may_skip
        self._loaded: Mapping[str, LayerScales] = {}
        self._is_new = False
        self._tensors: list[Tensor] = []
        self._amaxes: dict[str, list[Tensor]] = {}
        self._copies: tuple[list[Tensor], list[Tensor]] = [], []  # the tensors that were copied, and their copies
        self._forget()

    def _forget(self) -> None:
        """Look at the layers again in the next forward: their scales may be other tensors."""
        self._count = -1  # of the scales in this process, when the layers were last looked at
        self._is_copied = False

    def expect(self) -> None:
        """Register the layers in the next forward; call this when layers were converted, on a GPU."""
        self._is_new = True
        self._forget()

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Surround a forward, inside Transformer Engine's autocast, which renews the scales when it ends.

        Ranks reduce amax in the order in which layers were registered. Left alone, layers register in their first
        forward, and an expert without tokens on one rank would give every later layer there the amax of another layer.
        """
        if is_new := self._is_new:
            transformer_engine.register_scales(layer for _, layer in self.layers())
            self._is_new = False
        if self._may_skip and torch.is_grad_enabled() and not self._is_copied:
            self._copy()
        # the first layer to run would renew the backward scales: let all layers believe that another one was first
        transformer_engine.manager().quantization_state.is_first_fp8_module = False
        yield
        if is_new:
            self._count = -1  # layers that the user built have made their scales now
        if torch.is_grad_enabled():
            self._drop_nonfinite("forward")

    def after_step(self, *, skipped: bool = False) -> None:
        """Renew the scales of gradients, on every rank, after an optimizer has stepped.

        ``skipped``: restore all scales, because all ranks skipped the step, where a gradient was not finite.
        """
        is_copied, self._is_copied = self._is_copied, False
        if not (skipped and self._may_skip):
            self._drop_nonfinite("backward")
            transformer_engine.manager().reduce_and_update_fp8_tensors(forward=False)
            return
        if is_copied:
            self._restore_copies()
        for _, layer in self.layers():
            if hasattr(layer, "weight_seen"):
                layer.weight_seen = None  # else the amax of a weight that is kept would be missing

    def state(self) -> dict[str, Any]:
        """Return the scales as plain tensors, which ``torch.load(weights_only=True)`` reads; {} before any forward."""
        self.restore()  # scales that were loaded and not used yet
        scales = saved_scales(self.layers()) or self._loaded  # of a plain model
        return {SCALES: scales} if scales else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take a plugin's state, for layers that may not be set up yet."""
        self._loaded = state.get(SCALES) or {}

    def restore(self) -> None:
        """Give the layers the scales that were loaded, if the layers are set up."""
        layers = list(self.layers()) if self._loaded else []
        if not layers:
            return
        left = restore_scales(layers, self._loaded, self.recipe)
        self._forget()
        if left:
            info(f"No layer for {len(left)} of the checkpoint's delayed scales ({left[0]!r}, ...).")
        self._loaded = {}

    def _look(self) -> None:
        """Find the scales and histories, if layers got theirs since the last look."""
        count = transformer_engine.count_registered()
        if count == self._count:
            return
        found = [(mode, transformer_engine.scale_state(layer, mode)) for _, layer in self.layers() for mode in _MODES]
        states = [(mode, state) for mode, state in found if state is not None]
        self._tensors = [tensor for _, state in states for tensor in (state.scale, state.amax_history)]
        self._amaxes = {mode: [state.amax_history[0] for of, state in states if of == mode] for mode in _MODES}
        self._count = count

    @torch.no_grad()
    def _copy(self) -> None:
        self._look()
        if self._copies[0] is not self._tensors:
            self._copies = self._tensors, [torch.empty_like(tensor) for tensor in self._tensors]
        copy_all_(self._copies[1], self._tensors)
        self._is_copied = True

    @torch.no_grad()
    def _restore_copies(self) -> None:
        copy_all_(*self._copies)
        self._look()
        copied = {id(tensor) for tensor in self._copies[0]}
        for tensor in self._tensors:
            if id(tensor) not in copied:  # of a layer that had no scales before the step
                tensor.fill_(1.0 if tensor.dim() == 1 else 0.0)  # a scale, or a history

    @torch.no_grad()
    def _drop_nonfinite(self, mode: str) -> None:
        """Set every amax of this step that is not finite to 0, before Transformer Engine puts it into the history.

        Transformer Engine keeps a scale unchanged while the largest amax of its history is not finite: for 1024 steps,
        with a history of 1024. All layers are handled together: few kernels, no synchronisation.
        """
        self._look()
        if rows := self._amaxes[mode]:
            flat = torch.cat(rows).nan_to_num_(posinf=0.0, neginf=0.0)
            copy_all_(rows, list(torch.split(flat, [row.numel() for row in rows])))


def saved_scales(layers: Layers) -> dict[str, LayerScales]:
    """Return the scales of every layer that has scales, by name; {} with recipes that keep no scales."""
    scales = {}
    for name, layer in layers:
        states = {mode: transformer_engine.scale_state(layer, mode) for mode in _MODES}
        if None not in states.values():
            tensors = {f"{mode}.{tensor}": getattr(states[mode], tensor) for mode, tensor in product(_MODES, _TENSORS)}
            scales[name] = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
    return scales


@torch.inference_mode(False)  # validation may come first, and training cannot write to tensors of inference mode
@torch.no_grad()
def restore_scales(layers: Layers, state: Mapping[str, LayerScales], recipe: object) -> list[str]:
    """Give layers the scales that :func:`saved_scales` returned; return the names for which there is no layer.

    A history that is longer than the recipe's is cut; a shorter one is filled up with zeros.
    """
    layer_of = dict(layers)
    for name, mode in product(state.keys() & layer_of.keys(), _MODES):
        scale, history = (state[name][f"{mode}.{tensor}"] for tensor in _TENSORS)
        target = transformer_engine.scale_state(layer_of[name], mode)
        if target is None:
            target = transformer_engine.make_scale_state(layer_of[name], mode, recipe, scale.numel())
        target.scale.copy_(scale)
        history = history[: len(target.amax_history)]
        target.amax_history.zero_()
        target.amax_history[: len(history)].copy_(history)
    return [name for name in state if name not in layer_of]


def checkpoint_by_te(model: nn.Module, *, wanted: bool) -> None:
    """Replace transformers' checkpoint functions in ``model`` by Transformer Engine's, or put them back."""
    for module in model.modules():
        function: Any = vars(module).get(CHECKPOINT_FUNCTION)
        is_te = getattr(function, "func", None) is run_by_te
        if wanted and function is not None and not is_te:
            vars(module)[CHECKPOINT_FUNCTION] = partial(run_by_te, function)
        elif not wanted and is_te:
            vars(module)[CHECKPOINT_FUNCTION] = function.args[0]


def run_by_te(replaced: Callable[..., Any], function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Run ``function`` now, and again in the backward pass with the scales of the first run; ``replaced`` cannot."""
    from transformer_engine.pytorch import checkpoint

    kwargs.pop("use_reentrant", None)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)
