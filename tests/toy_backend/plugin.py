"""The plugin: what the base cannot know."""

import torch
from torch import nn

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import PlanRequest
from lightning_lowprec.conversion.in_place import unchanged
from lightning_lowprec.conversion.options import LayerOptions, shows, takes
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.base import LowPrecision
from tests.toy_backend.linear import convert


@shows()
class Toy(LowPrecision):
    """Rounds to e4m3."""

    backend = "toy"
    autocast_dtype = torch.bfloat16

    @takes(LayerOptions)
    def __init__(self, options: LayerOptions) -> None:
        super().__init__(None)
        self.layers = options
        self.precision = "fp8-toy"

    def how(self, device: torch.device) -> str:
        return f"rounded to e4m3 on {device}"

    def gathers(self, options: object) -> str | None:
        return None

    def _prepare(self, module: nn.Module, device: torch.device) -> None:
        backends.revert_all(module)
        self.plan = fp8.plan_or_raise(module, self.layers, PlanRequest(conv1d=False), precision=self.precision)
        with unchanged(module):
            convert(module, self.plan.converted)
