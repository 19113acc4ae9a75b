"""The plugin of NVFP4: as the paper trained (arXiv 2509.25149), the last blocks and the end of a run in bf16."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, final

import torch
from typing_extensions import Unpack, override

from lightning_lowprec.checks import Rule
from lightning_lowprec.conversion.options import LayerOptions, shows, take
from lightning_lowprec.precision.options import FP8Options
from lightning_lowprec.precision.schedule import Schedule
from lightning_lowprec.private.torchao import prototype_refusal
from lightning_lowprec.products.arithmetic import Arithmetic
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.torchao.backend import LAST_BLOCKS
from lightning_lowprec.torchao.one_format import Choices, OneFormatTorchAO, ProductsPerLayer
from lightning_lowprec.torchao.plugin import SHARED

Gemms = Annotated[
    Mapping[Literal["forward", "backward"], Literal["nvfp4", "mxfp8"]],
    Rule(
        "a mapping such as {'forward': 'nvfp4', 'backward': 'mxfp8'}",
        lambda gemms: {*gemms} <= {"forward", "backward"} and {*gemms.values()} <= {"nvfp4", "mxfp8"},
    ),
]
Share = Annotated[float, Rule("a share from 0.0 to below 1.0", lambda share: 0 <= share < 1)]
FINISH: Final = 0.18
"""The paper's finish costs about 6 % of the compute of a run (appendix D); a forward is a third of a step."""


@final
@shows(LayerOptions, FP8Options, *SHARED, without=("base",))
class NVFP4TorchAO(OneFormatTorchAO):
    """The GEMMs of the Linear layers in NVFP4, everything else in bf16; float32 weights unless told otherwise.

    Codes have 4 bits (e2m1), with an e4m3 scale per 16 values, of weights per 16 x 16, and a float32 scale per tensor.
    torch's kernels for these products run on Blackwell; elsewhere NVFP4 can be emulated. Features are multiples of 32.
    Stacked experts stay in bf16. FSDP2 gathers the codes. As the paper trained, the last blocks of the model and the
    forward at the end of the run are in bf16 (arXiv 2509.25149).

    Args:
        recipe: ``"nvfp4"``, or recipes per layer as in :class:`~lightning_lowprec.FP8TorchAO`:
            ``{"blocks.0.*": "bf16", "*": {"grad_weight": "bf16"}}`` computes one of the GEMMs in high precision.
        last_blocks_bf16: the share of each stack of blocks, at its end, that stays in bf16; 0.0: none.
        forward_finish: the last share of a run, in which the forward is in bf16 and the backward stays in NVFP4; 0.0:
            none. A ``schedule`` takes its place. A run whose number of steps is not known has no finish; in Fabric
            ``plugin.set_step(step, total=N)`` tells it.
        gemms: the format of the forward and of both GEMMs of the backward: ``{"forward": "nvfp4", "backward":
            "mxfp8"}``, for example, of which FSDP2 gathers bf16; None: all in NVFP4.
        hadamard: multiply the operands of the weight gradient with a Hadamard matrix of random signs.
        stochastic_rounding: round the codes of gradients stochastically. The random numbers are torch's, which no
            checkpoint of Lightning holds.
        reference: whose order of operations the scales follow, bit for bit: ``"transformer_engine"`` or ``"torchao"``.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: torchao is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device has no NVFP4 and ``emulate`` is not set.
    """

    hardware_recipe: RecipeKey | None = "torchao-nvfp4"
    format: ClassVar[str] = "NVFP4"
    kind: ClassVar[str] = "nvfp4"
    name: ClassVar[str] = "nvfp4-torchao"
    alignment: ClassVar[int] = 32
    own = "last_blocks_bf16", "gemms", "hadamard", "stochastic_rounding", "reference"

    def __init__(
        self,
        recipe: Literal["nvfp4"] | ProductsPerLayer = "nvfp4",
        *,
        last_blocks_bf16: Share = LAST_BLOCKS,
        forward_finish: Share = FINISH,
        gemms: Gemms | None = None,
        hadamard: bool = True,
        stochastic_rounding: bool = True,
        reference: Literal["transformer_engine", "torchao"] = "transformer_engine",
        **options: Unpack[Choices],
    ) -> None:
        self.last_blocks_bf16, self.gemms = last_blocks_bf16, {"forward": "nvfp4", "backward": "nvfp4", **(gemms or {})}
        self.hadamard, self.stochastic_rounding, self.reference = hadamard, stochastic_rounding, reference
        self.one_code = self.gemms["forward"] == self.gemms["backward"]
        if "nvfp4" not in self.gemms.values():
            raise ValueError(f"`gemms={gemms!r}` computes nothing in NVFP4. Use `MXFP8TorchAO()`.")
        running = take(FP8Options, options)
        super().__init__(recipe, base="bf16", low_eval=running.fp8_eval, emulate=running.emulation, options=options)
        if self.phases is None and forward_finish:
            self.follow_schedule(Schedule.finish(forward_finish))

    @override
    def refusal(self, device: torch.device) -> str | None:
        if (missing := super().refusal(device)) is not None:
            return missing
        if "mxfp8" in self.gemms.values() and (missing := prototype_refusal("mxfp8")) is not None:
            return missing
        if isinstance(self.emulate, str):
            return f"`emulate={self.emulate!r}` is not valid: sums of NVFP4 are not modelled; expected True"
        return self.refusal_of_kernels(device)

    @override
    def plan_options(self, device: torch.device) -> dict[str, Any]:
        return {**super().plan_options(device), "last_blocks": self.last_blocks_bf16}

    @override
    def arithmetic(self, device: torch.device) -> Arithmetic:
        return self._of("forward", device)

    @override
    def of_backward(self, device: torch.device) -> Arithmetic:
        return self._of("backward", device)

    def _of(self, direction: Literal["forward", "backward"], device: torch.device) -> Arithmetic:
        if self.gemms[direction] == "mxfp8":
            from lightning_lowprec.products.mxfp8 import MXFP8

            return MXFP8(emulate=self.emulates(device))
        from lightning_lowprec.products.nvfp4 import NVFP4

        return NVFP4(
            emulate=bool(self.emulates(device)),
            hadamard=self.hadamard,
            stochastic=self.stochastic_rounding,
            reference=self.reference,
        )
