"""The layers of a model, by the names that they have without wrappers, and the gradients of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import Tensor, nn

from lightning_lowprec.private.torch_modules import whole

_WRAPPERS: Final = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def named_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the name that they have without compilation and checkpointing."""
    for fqn, module in model.named_modules():
        yield ".".join(part for part in fqn.split(".") if part not in _WRAPPERS), module


def on_gradient(output: Tensor, function: Callable[[Tensor], None]) -> None:
    """Call ``function`` with the gradient of ``output``, or of the padded rows of which ``output`` is a part."""
    register: Any = whole(output).register_hook
    register(function)
