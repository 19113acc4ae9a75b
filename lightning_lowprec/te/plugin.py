"""FP8 training through Transformer Engine: its layers in place of torch's, every recipe it has."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.checks import Count
from lightning_lowprec.conversion import in_place, module_dtypes
from lightning_lowprec.conversion.backends import PlanRequest
from lightning_lowprec.conversion.name_formats import EXPERTS_NEED_TORCHAO, of_options
from lightning_lowprec.conversion.options import LayerOptions, shows, take, takes
from lightning_lowprec.conversion.plan import IN_METRIC, Plan, make_plan
from lightning_lowprec.conversion.selection import in_metrics
from lightning_lowprec.extras import require
from lightning_lowprec.hardware import describe, refusal_and_remedy
from lightning_lowprec.messages import info
from lightning_lowprec.precision import fp8
from lightning_lowprec.precision.fp8 import Converting
from lightning_lowprec.precision.host import Engine
from lightning_lowprec.precision.options import FP8Options, MasterOptions, TrainingOptions
from lightning_lowprec.private.transformer_engine import check_names
from lightning_lowprec.runs_where import RecipeKey
from lightning_lowprec.te import delayed_scaling, recipes
from lightning_lowprec.te.backend import NAME, NAMES, WITH_MASTERS
from lightning_lowprec.te.delayed_scaling import SCALES, DelayedScales
from lightning_lowprec.te.recipes import MODULE


@dataclass(frozen=True, kw_only=True)
class TEOptions(LayerOptions, FP8Options, TrainingOptions, MasterOptions):
    """The arguments of :class:`FP8TE`."""

    recipe: recipes.Kind | Mapping[str, Any] | Any = field(default="delayed", kw_only=False)
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    margin: int | None = None
    amax_history_len: Count | None = None
    amax_compute_algo: Literal["max", "most_recent"] | None = None
    reduce_amax: bool | None = None
    fp8_params: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    norms: bool = True


@final
@shows()
class FP8TE(Converting):
    """The GEMMs of the Linear layers in FP8 by Transformer Engine, everything else under autocast.

    Linears, LayerNorms and RMSNorms become Transformer Engine's in place; checkpoints stay those of the model.
    ``first_last_layers_bf16`` does not go with delayed scaling.

    Args:
        recipe: ``"delayed"`` (scales from the amax of past steps), ``"current"`` (from each tensor), ``"block"``,
            ``"mxfp8"``, ``"nvfp4"``, a mapping ``{"recipe": ..., field: value}``, or a recipe object of Transformer
            Engine. ``{"recipe": "current", "backward_override": "high_precision"}`` has a backward in high precision.
        fp8_format: gradients in e5m2 (``"hybrid"``) or e4m3; None is the recipe's own.
        margin: of delayed scaling and mxfp8: scales are ``2 ** margin`` smaller.
        amax_history_len: steps that delayed scaling remembers; None is Transformer Engine's 1024.
        amax_compute_algo: of delayed scaling: ``"max"`` or ``"most_recent"`` of the history.
        reduce_amax: of delayed scaling: whether all ranks use the same scales.
        fp8_params: quantise weights once per optimizer step, and keep them until the next, also for evaluation; every
            weight stays in high precision too. Asks of the program that nothing writes to weights through
            ``weight.data`` between two steps of an optimizer: nobody can see that.
        fp8_dpa: attention in FP8, where the attention is Transformer Engine's own.
        fp8_mha: keep values in FP8 around attention, where the attention is Transformer Engine's own.
        norms: whether LayerNorms and RMSNorms become Transformer Engine's too, all that can; with ``only`` none do.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: Transformer Engine is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device cannot run the recipe.
    """

    backend: ClassVar[str | None] = NAME

    @takes(TEOptions)
    def __init__(self, options: TEOptions) -> None:
        masters = options.resolve(options.base)
        super().__init__(options.scaler(options.base), masters, options)
        require(MODULE, "FP8TE")
        check_names()
        same = "fp8_format", "margin", "amax_history_len", "amax_compute_algo", "reduce_amax"
        fields = {name: getattr(options, name) for name in same}
        fields |= {"fp8_dpa": options.fp8_dpa or None, "fp8_mha": options.fp8_mha or None}
        self.recipe: Any = recipes.make_recipe(options.recipe, **fields)
        """The recipe object of Transformer Engine."""
        self.kind = recipes.kind_of(self.recipe)
        self.layers = take(LayerOptions, options)
        self.base = options.base
        self.fp8_eval = options.fp8_eval
        self.norms = options.norms
        self._fp8_params = options.fp8_params
        self.not_sharded = "fp8_params=True" if options.fp8_params else None
        if self.kind == "delayed" and self.layers.first_last_layers_bf16:
            raise ValueError(
                "`first_last_layers_bf16=True` is not valid with delayed scaling, whose scales are reduced for all"
                " layers at once (Megatron refuses it too); use `recipe='current'`."
            )
        if self.kind == "nvfp4" and self.base == "fp16":
            raise ValueError(
                "`base='fp16'` is not valid with `recipe='nvfp4'`, whose Hadamard transform is made for bf16; use"
                " `base='bf16'`."
            )
        self.scales: DelayedScales | None = None
        if self.kind == "delayed":
            self.scales = DelayedScales(self.recipe, self._scaled_layers, may_skip=self.scaler is not None)
        name = NAMES.get((self.kind, self.recipe.fp8_format.name.lower()), f"fp8-te-{self.kind}")
        kept = masters.config.kept if masters is not None and name in WITH_MASTERS else None
        self.precision = name + of_options(self.base, kept)

    @property
    def fp8_params(self) -> bool:
        """Whether quantised weights are kept. A property: setting NeMo's attribute raises."""
        return self._fp8_params

    @property
    @override
    def hardware_recipe(self) -> RecipeKey | None:
        if self.kind == "nvfp4" and self.recipe.disable_rht and self.recipe.disable_stochastic_rounding:
            return "te-nvfp4-plain"
        return cast(RecipeKey, f"te-{self.kind}") if self.kind in recipes.KINDS else None

    @override
    def refusal(self, device: torch.device) -> str | None:
        # the first forward raises where Transformer Engine asks for a later CUDA
        return refusal_and_remedy(self.hardware_recipe or "te-current", device)

    @override
    def how(self, device: torch.device) -> str:
        format = {"mxfp8": "MXFP8", "nvfp4": "NVFP4"}.get(self.kind, "FP8")
        return f"{format} kernels of Transformer Engine on {describe(device)}"

    @override
    def gathers(self, options: object) -> str | None:
        return (
            "layers of Transformer Engine gather weights in high precision. For weights in FP8 use 'fp8-hybrid' with"
            " `FSDP2Strategy(fp8_all_gather=True)`"
        )

    @override
    def engine_refusal(self, engine: Engine) -> str | None:
        if engine.frees_weights:
            return "Transformer Engine keeps weights from forward to backward. Use stage 1 or 2, or 'fp8-hybrid'"
        return None

    @override
    def sharded_identity(self) -> tuple[object, ...]:
        return self.precision, self.recipe, self.layers, self.fp8_eval, self.norms

    @override
    def _prepare(self, module: Module, device: torch.device) -> None:
        if self.scales is not None and self._in_trainer and module not in self.modules.prepared:
            self.scales.load({})  # those of another module
        alignment = recipes.alignment_of(self.recipe)
        request = PlanRequest(
            experts=EXPERTS_NEED_TORCHAO, base=self.base, head=self.head, alignment=alignment, conv1d=False
        )
        plan = replace(make_plan(module, self.layers, request), norms=self._choice_of_norms(module))
        self._convert(module, plan)
        if not any(scaled_layers(module)):
            none = f"none of the {len(plan.rows)} linear layers of {type(module).__name__}"
            raise fp8.nothing_converts(self.precision, none, plan, multiple=alignment)
        self._check_attention(module)
        fp8.take_plan(self, module, plan)
        if self.scales is not None and device.type == "cuda":
            self.scales.expect()

    def _choice_of_norms(self, module: Module) -> dict[str, str | None]:
        """Return all norms by fqn, each with the reason why it stays, or None."""
        from lightning_lowprec.te.norms import NO_NORM, reason_to_keep

        if not self.norms or self.layers.only is not None:
            return {}
        inside = in_metrics(module)
        reasons = {fqn: reason_to_keep(m) for fqn, m in module.named_modules()}
        return {fqn: IN_METRIC if fqn in inside else why for fqn, why in reasons.items() if why != NO_NORM}

    def _convert(self, module: Module, plan: Plan) -> None:
        """Convert a module in place as ``plan`` says. Layers that were converted keep their scales."""
        from lightning_lowprec.te.layer import convert_linears
        from lightning_lowprec.te.norms import convert_norms

        before = delayed_scaling.saved_scales(scaled_layers(module))
        keep_weights = self.fp8_params
        with in_place.unchanged(module):
            convert_linears(module, plan.converted, self.recipe, fp8_eval=self.fp8_eval, keep_weights=keep_weights)
            convert_norms(module, [fqn for fqn, reason in plan.norms.items() if reason is None])
        module_dtypes.run_in_float32(module, plan)
        delayed_scaling.checkpoint_by_te(module, wanted=self.kind == "delayed")
        if self.kind == "delayed" and before:
            delayed_scaling.restore_scales(scaled_layers(module), before, self.recipe)

    def _check_attention(self, module: Module) -> None:
        name = next((name for name in ("fp8_dpa", "fp8_mha") if getattr(self.recipe, name)), None)
        attention = require(MODULE, "FP8TE").DotProductAttention
        if name is not None and not any(isinstance(m, attention) for m in module.modules()):
            raise ValueError(
                f"`{name}=True` is for Transformer Engine's own attention (`te.DotProductAttention`), and"
                f" {type(module).__name__} has none; leave it out, or build the model with it."
            )

    @override
    def _converted_layers(self, module: Module) -> Iterable[Module]:
        from lightning_lowprec.te.layer import TELinear

        return [layer for layer in module.modules() if isinstance(layer, TELinear)]

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Autocast, and Transformer Engine's; amax is reduced over all ranks when it ends.

        Inference mode is replaced by ``no_grad``: the first forward makes buffers that training writes to.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad(), self.forward_context():
                yield
            return
        autocast = super().forward_context()  # may set up the model
        if self.scales is not None:
            self.scales.restore()
        renewal = nullcontext() if self.scales is None else self.scales.in_forward()
        with autocast, require(MODULE, "FP8TE").autocast(enabled=True, recipe=self.recipe), renewal:
            yield

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step; then renew the delayed scales of gradients, or restore all delayed scales if the step was skipped."""
        skipped = self.skipped_steps
        output = super().optimizer_step(optimizer, *args, **kwargs)
        ended = self.engine is None or self.engine.ended_step  # DeepSpeed counts micro-batches itself
        if self.scales is not None and ended:
            self.scales.after_step(skipped=self.skipped_steps > skipped)
        return output

    @override
    def teardown(self) -> None:
        """Keep the delayed scales for the next set-up, then hand the model back, whose plain layers have none."""
        if self.scales is not None:
            self.scales.load(self.scales.state())
        super().teardown()

    def _scaled_layers(self) -> list[tuple[str, object]]:
        """Name every layer by the number of the module that was set up, and by its fqn there."""
        modules = dict.fromkeys(self.modules.prepared)  # a module that was set up again counts once
        return [(f"{i}.{fqn}".rstrip("."), layer) for i, m in enumerate(modules) for fqn, layer in scaled_layers(m)]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale if there is one, the backend, and with delayed scaling its scales, as plain tensors."""
        delayed = {} if self.scales is None else self.scales.state()
        return {**super().state_dict(), **delayed}

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Restore the loss scale, and the scales for the next forward; what has no use here is dropped, and logged."""
        super().load_state_dict(state_dict)
        if self.scales is not None:
            self.scales.load(state_dict)
        elif state_dict.get(SCALES):
            info(f"Dropped the delayed scales of the checkpoint: `precision={self.precision!r}` needs none.")


def revert(model: Module) -> None:
    """Give ``model`` torch's own layers back, in place; layers of Transformer Engine that the user built stay."""
    from lightning_lowprec.te.layer import convert_linears
    from lightning_lowprec.te.norms import convert_norms

    convert_linears(model, (), None)
    convert_norms(model, ())
    delayed_scaling.checkpoint_by_te(model, wanted=False)


def scaled_layers(model: Module) -> Iterator[tuple[str, Module]]:
    """Yield all layers of Transformer Engine that may keep scales, ours and the user's."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for fqn, module in model.named_modules():
        if isinstance(module, TransformerEngineBaseModule):
            yield fqn, module
