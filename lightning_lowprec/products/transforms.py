"""Raise where code asks of a layer in low precision what its kernels cannot do, and name the way out.

Nothing of this happens in ordinary training. Without these checks, torch's or the backend's errors speak of their own
insides, and Transformer Engine returns wrong gradients of gradients without an error.
"""

from typing import Final, NoReturn

import torch
from torch import Tensor

from lightning_lowprec.private.torch import are_transforms_active, is_exporting, is_tracing

PLAIN_FIRST: Final = "Call `lightning_lowprec.plain(model)` first: it gives a model torch's own layers back"
PLAIN_IN_EVALUATION: Final = (
    "Build the plugin with `fp8_eval=False` and call `model.eval()`: the layers are plain then. Or"
    " keep the layers that need it in high precision (`keep=[...]`)."
)
KEEP: Final = "Keep the layers that need it in high precision (`keep=[...]`), or take another precision."

FORWARD_MODE: Final = (
    f"a derivative in forward mode (`torch.autograd.forward_ad`) does not run through layers in low precision. {KEEP}"
)


def refuse_forward_mode(ctx: object, *grad_inputs: object) -> NoReturn:
    """Raise RuntimeError: the ``jvp`` of an autograd function that has no derivative in forward mode."""
    raise RuntimeError(FORWARD_MODE)


def check_call(layer: str, remedy: str = PLAIN_IN_EVALUATION) -> None:
    """Raise RuntimeError if a layer of this name is called under ``torch.func``, or exported or traced.

    A layer asks ``torch.compiler.is_exporting()`` before it calls this function. In code that torch 2.11 compiles the
    answer is always True, so the question is asked again here.
    """
    if is_exporting():
        raise RuntimeError(
            f"`torch.export` and `torch.onnx.export` cannot export {layer}, a layer in low precision."
            f" {PLAIN_FIRST}. Other ways: {remedy}"
        )
    if is_tracing():
        raise RuntimeError(
            f"`torch.jit.trace` cannot trace {layer}, a layer in low precision. {PLAIN_FIRST}. Other ways: {remedy}"
        )
    if are_transforms_active():
        refused = "`torch.func` (grad, vmap, jvp, jacrev, ...) does not run through"
        raise RuntimeError(f"{refused} {layer}, a layer in low precision. {remedy}")


def refuse_layout(input: Tensor, layer: str) -> None:
    """Raise TypeError for a sparse or jagged input."""
    raise TypeError(
        f"{layer}, a layer in low precision, got an input of {input.layout}, and takes dense ones. Give it the values"
        " of a jagged tensor (`x.values()`), or make a sparse one dense (`x.to_dense()`); or keep the layer in high"
        " precision: `keep=[...]`."
    )


def check_backward(layer: str, remedy: str = KEEP) -> None:
    """Raise RuntimeError in a backward pass of which a gradient is wanted (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a gradient of a gradient (`create_graph=True`, as in gradient penalties) does not run through {layer}."
            f" {remedy}"
        )


def without_second_gradient(output: Tensor) -> Tensor:
    """Return what Transformer Engine has computed; a gradient of its gradient raises, and would lack a part else.

    Not for code that is compiled.
    """
    if output.requires_grad:
        output.register_hook(_refuse)  # type: ignore[no-untyped-call]
    return output


def _refuse(grad: Tensor) -> None:
    check_backward("a layer of Transformer Engine", f"{KEEP} torchao's layers run (`FP8TorchAO`, 'fp8-hybrid').")
