"""Spare the null GPU the tuning of Triton kernels, which would compile every variant and learn nothing."""

from torch.utils._triton import has_triton


def take_first_variant() -> None:
    """Let torchao's tuned kernels, of int8 and of blocks, have one variant in place of many, in this process."""
    if has_triton():
        from torchao.prototype.blockwise_fp8_training import kernels as blocks
        from torchao.prototype.quantized_training.int8_mm import _scaled_int8_mm_kernel
        from triton.runtime.autotuner import Autotuner

        for kernel in (_scaled_int8_mm_kernel, *vars(blocks).values()):
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]
