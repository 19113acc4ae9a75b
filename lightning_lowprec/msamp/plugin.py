"""MS-AMP's levels: Linear weights, their gradients and their optimizer state in 8 and 16 bits, with scales."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_lowprec.checks import check_choice
from lightning_lowprec.conversion.backends import PlanRequest
from lightning_lowprec.conversion.in_place import unchanged
from lightning_lowprec.conversion.options import LayerOptions, shows, take, takes
from lightning_lowprec.masters.float32_values import keep
from lightning_lowprec.masters.moments import params_by_key
from lightning_lowprec.msamp.adamw import ALIVE, OPTIONS, ScaledAdamW, check_options
from lightning_lowprec.msamp.backend import NAME
from lightning_lowprec.msamp.ddp import average_scaled_gradients, broadcast_codes, exclude_codes, ranks
from lightning_lowprec.msamp.layer import ScaledLayer
from lightning_lowprec.msamp.linear import revert, scale_linears, scaled_linears
from lightning_lowprec.msamp.weight_state import Level, msamp_state_of, required_state_of
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.one_pass import compiles
from lightning_lowprec.numerics.parameters import WeakList, parameters_of
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.fp8 import BlockOptions, Converting, compile_blocks
from lightning_lowprec.precision.host import callbacks_of
from lightning_lowprec.precision.options import EmulationOptions, FP8Options, RunOptions
from lightning_lowprec.precision.refusals import refuse_averaging
from lightning_lowprec.private import torch as private
from lightning_lowprec.private.either import LightningOptimizer, both
from lightning_lowprec.private.torch_optimizers import check_step, refuse_copies
from lightning_lowprec.runs_where import RecipeKey


@dataclass(frozen=True, kw_only=True)
class MSAMPOptions(LayerOptions, BlockOptions, FP8Options, EmulationOptions, RunOptions):
    """The arguments of :class:`MSAMP`."""

    level: Level = field(default="O2", kw_only=False)
    grad_accumulation_dtype: torch.dtype | None = None


@final
@shows()
class MSAMP(Converting):
    """Linear layers with weights of 8 or 16 bits, FP8 GEMMs and FP8 gradients; the rest under autocast, in float32.

    AdamW and Adam are made to step such weights in place. Bytes per weight, with gradient, master and AdamW's moments:
    O1 11, O2 6, O3 7 (in float32: 16). With ``fp8_eval=False`` evaluation multiplies with the weights as stored. On
    GPUs with FP8, codes outside of compiled blocks and the step of the optimizer are compiled in any case.

    Args:
        level: ``"O1"`` keeps fp16 weights with a scale, ``"O2"`` also e4m3 and fp16 moments, ``"O3"`` e4m3 codes for
            products beside the fp16 weights, which are MS-AMP's masters.
        grad_accumulation_dtype: ``torch.float32`` adds the gradients of micro-batches up in float32 (3 more bytes per
            weight); None adds them in e4m3.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        TypeError: an optimizer that cannot step such weights.
        RuntimeError: the device has no FP8 and ``emulate`` is not set.
    """

    backend: ClassVar[str | None] = NAME
    keeps_codes = True
    hardware_recipe: RecipeKey | None = "msamp"

    @takes(MSAMPOptions)
    def __init__(self, options: MSAMPOptions) -> None:
        check_choice("grad_accumulation_dtype", options.grad_accumulation_dtype, (None, torch.float32))
        super().__init__(options.scaler(options.base), None, options)
        self.base, self.fp8_eval, self.emulate = options.base, options.fp8_eval, options.emulation
        self.layers = take(LayerOptions, options)
        self.level: Level = options.level
        self.shards_codes = self.level == "O3"
        self.grad_accumulation_dtype = options.grad_accumulation_dtype
        self.compile = options.compile
        self.precision = f"msamp-{self.level.lower()}" + ("-fp16" if self.base == "fp16" else "")
        self._ddp_modules: WeakList[DistributedDataParallel] = WeakList()

    @override
    def refusal(self, device: torch.device) -> str | None:
        return fp8.kernel_refusal("msamp", self.emulate, device, f"MSAMP({self.level!r}, emulate=True)")

    @override
    def sharded_identity(self) -> tuple[object, ...]:
        return self.precision, self.layers, self.emulate, self.fp8_eval

    @override
    def bind_shards(self, reshard: Callable[[Module], None]) -> None:
        if not self.shards_codes:
            raise ValueError(
                f"`precision={self.precision!r}` does not run sharded. It runs on one device and under 'ddp';"
                " 'msamp-o3' runs under 'fsdp2', and so does 'fp8-hybrid'."
            )
        super().bind_shards(reshard)

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        plan = fp8.plan_or_raise(
            module,
            self.layers,
            PlanRequest(
                base=self.base,
                converted_class=ScaledLayer,
                stores_codes=True,
                head=self.head,
                pads=True if self.modules.sharded is None else None,  # FSDP2 cuts codes into equal parts
            ),
            precision=self.precision,
        )
        layers = scaled_linears(module)
        keep_e4m3 = {required_state_of(layer.weight).e4m3 is not None for layer in layers.values()}
        if not layers or layers.keys() != set(plan.converted) or keep_e4m3 != {self.level == "O3"}:
            revert(module)
            converted: list[Any] = [module.get_submodule(fqn) for fqn in plan.converted]
            for p in {part.weight for part in converted}:
                if not (self._will_train and p.requires_grad) and p.dtype not in HALF_DTYPES:
                    keep(p, p, on_host=True)
            with unchanged(module, may_change="the dtype"):
                scale_linears(module, plan.converted, self.level)
            layers = scaled_linears(module)
        for layer in layers.values():
            layer.emulate, layer.fp8_eval = self.emulates(device), self.fp8_eval
            layer.float32_gradients = self.grad_accumulation_dtype is torch.float32
        compile_blocks(
            module,
            layers.values(),
            False if self.compile == "auto" and not compiles(device) else self.compile,
            device,
            precision=self.precision,
            advice="FP8 is slow without `torch.compile`: compile the model yourself.",
        )
        if self.modules.sharded is None:
            self._exclude_codes(module)
        fp8.take_plan(self, module, plan, *([self.how(device)] if self.emulates(device) else []))

    def _exclude_codes(self, module: Module) -> None:
        """Let DDP ignore the weights of codes; raise ValueError if no weight is left for DDP to train."""
        coded = exclude_codes(module)
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        if self._will_train and ranks() and trained and coded.issuperset(trained):
            fqn = trained[-1].rpartition(".")[0]
            raise ValueError(
                f"`precision={self.precision!r}`: every trainable parameter of {type(module).__name__} would be kept"
                " as codes, and DDP wants at least one that is not. Keep a layer in high precision:"
                f" `MSAMP(..., keep=[{fqn!r}])`."
            )

    def _convert_optimizer(self, optimizer: Any) -> None:
        raw = optimizer.optimizer if isinstance(optimizer, both(LightningOptimizer)) else optimizer
        if not isinstance(raw, ScaledAdamW) or raw.level != self.level:
            convert_optimizer_(raw, self.level)

    @override
    def _prepare_weights_of(self, optimizer: Optimizer) -> None:
        super()._prepare_weights_of(optimizer)
        self._convert_optimizer(optimizer)

    @override
    def see_module(self, module: Module) -> None:
        if isinstance(module, DistributedDataParallel):
            self._ddp_modules.add(module)
            broadcast_codes(module, module.process_group)
        elif self.modules.sharded is None and ranks() > 1:
            broadcast_codes(module)

    @override
    def connect(self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        refuse_averaging(
            callbacks_of(model),
            f"averages the weights of the model, which `precision={self.precision!r}` keeps as codes with a scale: the"
            " average would be rounded. Leave it out and average state dicts, which are float32, or use a precision"
            " with float32 weights ('fp8-hybrid').",
        )
        return super().connect(model, optimizers, lr_schedulers)

    def _average_gradients(self, optimizer: Any) -> None:
        """Average the gradients of the optimizer's weights of codes over the ranks; averaged gradients stay."""
        if self.modules.sharded is not None or not (dist.is_available() and dist.is_initialized()):
            return
        coded = {id(p): p for p in parameters_of(optimizer) if msamp_state_of(p) is not None}
        if any(p.requires_grad for p in coded.values()) and ranks() > 1 and not self._ddp_modules:
            raise RuntimeError(
                f"`precision={self.precision!r}` needs to see the DDP module, and did not. In Fabric, `import"
                " lightning_lowprec` before it is made and set the model up with `fabric.setup`."
            )
        for module in self._ddp_modules:
            if module.process_group.size() > 1:
                average_scaled_gradients([p for p in module.parameters() if id(p) in coded], module.process_group)

    @override
    def optimizer_step(self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any) -> Any:
        """Step as in every precision, after the FP8 gradients were averaged over the ranks."""
        # a second optimizer in Fabric without the names, or an optimizer of a weight that was unfrozen
        self._convert_optimizer(optimizer)

        def averaged() -> object:
            result = None if closure is None else closure()
            self._average_gradients(optimizer)
            return result

        if closure is None:
            averaged()
            return super().optimizer_step(optimizer, model=model, **kwargs)
        return super().optimizer_step(optimizer, model=model, closure=averaged, **kwargs)

    @override
    def unscale_gradients(self, optimizer: Optimizer) -> None:
        self._average_gradients(optimizer)
        super().unscale_gradients(optimizer)

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: float = 0.0, *args: Any, **kwargs: Any) -> None:
        """Clip averaged, unscaled gradients; FP8 ones are rounded again where they are clipped by value."""
        if clip_val > 0:
            self._average_gradients(optimizer)
        super().clip_gradients(optimizer, clip_val, *args, **kwargs)


# ---- optimizers


def scaled_optimizers() -> list[Optimizer]:
    """Return every ScaledAdamW that still exists."""
    return [optimizer for optimizer in ALIVE if isinstance(optimizer, ScaledAdamW)]


def convert_optimizer_(optimizer: Optimizer, level: Level) -> None:
    """Let ``optimizer`` step parameters of codes, in place; an optimizer without such parameters does not change.

    If all parameters of codes are frozen, optimizers that are not supported do not change either. A second call changes
    nothing.

    Raises:
        TypeError: another optimizer.
        ValueError: an option that is not possible with MS-AMP, or an optimizer of another level.
        RuntimeError: somebody replaced ``optimizer.step``.
    """
    refuse_copies(optimizer, "the weights of MS-AMP, which are codes")
    coded = [p for p in parameters_of(optimizer) if msamp_state_of(p) is not None]
    if not coded:
        return
    if isinstance(optimizer, ScaledAdamW):
        if optimizer.level != level:
            if "plain_class" not in vars(optimizer):
                raise ValueError(
                    f"the optimizer has `level={optimizer.level!r}`; expected {level!r}, that of the weights."
                )
            saved = optimizer.state_dict()  # its weights were converted again
            optimizer.level = level
            optimizer.load_state_dict(saved)
        check_options(optimizer)
    elif type(optimizer) in (AdamW, Adam):
        check_options(optimizer)
        check_step(optimizer, private.MSAMP)
        scaled: Any = optimizer
        plain, before = type(scaled), scaled.state_dict() if scaled.state else None
        vars(scaled).pop("step", None)  # a scheduler's wrapper, which calls the old class; the new class needs none
        scaled.__class__ = ScaledAdamW
        options: dict[str, object] = {"level": level, "compile": "auto", "plain_class": plain}
        ScaledAdamW.__setstate__(scaled, options)  # gives the new class its step hooks
        if before is not None:
            scaled.load_state_dict(before)
    elif any(p.requires_grad for p in coded):
        cls = type(optimizer)
        raise TypeError(
            f"{cls.__module__}.{cls.__qualname__} cannot step weights that are kept as codes with a scale (MS-AMP"
            f" {level}); expected one of: torch.optim.AdamW, torch.optim.Adam, lightning_lowprec.msamp.ScaledAdamW."
        )


def revert_optimizer(optimizer: Optimizer) -> None:
    """Make an optimizer plain that :func:`convert_optimizer_` has converted, in place; its state becomes float32.

    Call after the weights have become plain; an optimizer of weights of codes does not change.
    """
    if any(msamp_state_of(p) is not None for p in parameters_of(optimizer)):
        return
    saved: Any = optimizer.state_dict()
    if "plain_class" not in vars(optimizer):
        optimizer.load_state_dict(saved)
        return
    optimizer.__class__ = vars(optimizer).pop("plain_class")
    for name in OPTIONS:
        vars(optimizer).pop(name)
    for key, p in params_by_key(optimizer, saved).items():
        if key in saved["state"]:  # torch's own loading would cast to the weights' dtype
            optimizer.state[p] = saved["state"][key]
