"""Inputs that tensor parallelism has encoded before the layer: torchao's ``Float8ColwiseParallel`` and its siblings.

These styles send activations between ranks as float8 codes with one scale, whatever the recipe of the layer is.
Importing this module imports torchao (about 3 s).
"""

from __future__ import annotations

from torch import Tensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from lightning_lowprec.private.torch import local_tensor

STYLES = "`Float8ColwiseParallel`, `Float8RowwiseParallel` or `PrepareFloat8ModuleInput`"


def check_coded_input(input: Tensor, *, in_fp8: bool, one_scale: bool) -> None:
    """Raise RuntimeError if ``input`` is codes, and the layer does not multiply codes with one scale.

    Args:
        input: what the layer got.
        in_fp8: whether the layer multiplies in FP8 now.
        one_scale: whether the recipe has one scale per tensor.
    """
    if not isinstance(local_tensor(input), Float8TrainingTensor) or (in_fp8 and one_scale):
        return
    got = f"An FP8 layer got an input of shape {tuple(input.shape)} that is float8 codes with one scale"
    if not in_fp8:
        raise RuntimeError(
            f"{got}, and computes in high precision now. Use `FP8TorchAO(fp8_eval=True)`, no phases in bf16, or torch's"
            f" own styles in place of {STYLES}."
        )
    raise RuntimeError(
        f"{got}, and the recipe of the layer has a scale per row. Use `FP8TorchAO(recipe='tensorwise')`, or torch's"
        f" `ColwiseParallel`, `RowwiseParallel` or `PrepareModuleInput` in place of {STYLES}."
    )
