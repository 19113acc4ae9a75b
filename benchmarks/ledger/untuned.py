"""Spare the null GPU the tuning of Triton kernels, which would compile every variant and learn nothing."""

from torch.utils._triton import has_triton


def take_first_variant() -> None:
    """Let torchao's int8 kernel have one variant in place of 27, in this process."""
    if has_triton():
        from torchao.prototype.quantized_training.int8_mm import _scaled_int8_mm_kernel

        _scaled_int8_mm_kernel.configs = _scaled_int8_mm_kernel.configs[:1]
