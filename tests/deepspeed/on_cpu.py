"""Let Lightning's DeepSpeedStrategy run on a CPU: Lightning asks for CUDA, and DeepSpeed for devices with an index."""

import os
import sys
from functools import cache

import torch

os.environ["DS_ACCELERATOR"] = "cpu"


@cache
def allow() -> None:
    import deepspeed.comm.torch  # noqa: F401
    from deepspeed.accelerator import get_accelerator
    from lightning.fabric.accelerators import CPUAccelerator as FabricCPU
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies import DeepSpeedStrategy as FabricDeepSpeed
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    FabricDeepSpeed.setup_environment = FabricDDP.setup_environment
    DeepSpeedStrategy.setup_environment = DDPStrategy.setup_environment
    for accelerator in (FabricCPU, CPUAccelerator):
        accelerator.get_parallel_devices = staticmethod(
            lambda devices: [torch.device("cpu", i) for i in range(devices)]
        )
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed asks oneDNN; torch computes fp16 on any CPU
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
