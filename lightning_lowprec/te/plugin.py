"""FP8 training through Transformer Engine: its layers in place of torch's, every recipe it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch import LightningModule
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_lowprec.conversion.backends import unconvert
from lightning_lowprec.conversion.converted import check_converted
from lightning_lowprec.conversion.options import LayerOptions
from lightning_lowprec.extras import require
from lightning_lowprec.hardware import describe
from lightning_lowprec.masters.half_weights import MasterWeights, resolve_masters
from lightning_lowprec.precision.backend_choice import check_ranks_agree, check_resumes
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.precision.half import DTYPES
from lightning_lowprec.precision.host import alive, device_of
from lightning_lowprec.precision.loss_scale_choice import LossScaleChoice, resolve_loss_scale
from lightning_lowprec.te import recipes, support
from lightning_lowprec.te.delayed_scaling import SCALES, DelayedScales
from lightning_lowprec.te.te_options import Base, check_base, check_options
from lightning_lowprec.te.wire_format import gather_refusal

BACKEND: Final = "transformer_engine"
_OVERRIDE: Final = "override_linear_precision"
_NAMES: Final = {
    ("delayed", "HYBRID"): "fp8-hybrid-te",
    ("delayed", "E4M3"): "fp8-e4m3-te",
    ("current", "HYBRID"): "fp8-current",
    ("block", "E4M3"): "fp8-block",
    ("mxfp8", "E4M3"): "mxfp8",
    ("nvfp4", "E4M3"): "nvfp4",
}


class FP8TE(LowPrecision):
    """The GEMMs of the Linear layers in FP8 by Transformer Engine, everything else under autocast.

    Linears, LayerNorms and RMSNorms become Transformer Engine's in place; checkpoints stay those of the model.

    Args:
        recipe: ``"delayed"`` (scales from the amax of past steps), ``"current"`` (from each tensor), ``"block"``,
            ``"mxfp8"``, ``"nvfp4"``, a mapping ``{"recipe": ..., field: value}``, or a recipe object of Transformer
            Engine. A ``CustomRecipe(qfactory=...)`` is one too: its function is told the fqn of each layer as
            ``role.name``; ``quantization_alignment``, if set, is what tokens and features are multiples of; it cannot
            ask for delayed scaling, nor be fused.
        fp8_format: gradients in e5m2 (``"hybrid"``) or e4m3; None is the recipe's own.
        margin: of delayed scaling and mxfp8: scales are ``2 ** margin`` smaller.
        amax_history_len: steps that delayed scaling remembers; None is Transformer Engine's 1024.
        amax_compute_algo: of delayed scaling: ``"max"`` or ``"most_recent"`` of the history.
        reduce_amax: of delayed scaling: whether all ranks scale alike.
        override_linear_precision: what Transformer Engine 1.x called it: (fprop, dgrad, wgrad) in high precision.
        interval: as well; 1 is what is done.
        fp8_params: keep the weights of FP8 layers in FP8 from one optimizer step to the next, also for evaluation, with
            float32 weights as their masters; also under ``master_weights``, which casts all others. Frozen ones are in
            FP8 alone (delayed and current scaling). Under FSDP2 the float32 shards of all are gathered as float8, which
            these recipes do by themselves.
        fp8_dpa: attention in FP8, where it is Transformer Engine's own.
        fp8_mha: keep it in FP8 around attention, where that is Transformer Engine's own.
        base: dtype of everything else: ``"bf16"``, or ``"fp16"`` with loss scaling.
        norms: whether LayerNorms and RMSNorms become Transformer Engine's too.
        fuse: ``"auto"`` computes norms with the Linears or MLP behind them, and experts, by single calls, where the
            structure is recognised exactly (Llama, Mistral, Qwen, Mixtral, GPT-NeoX, norm and Linear in a Sequential).
        keep: Linears and norms that stay as they are, beside output heads, routers and LoRA adapters: fqns, parts of
            fqns, patterns.
        only: if given, just these convert, and none of the built-in rules applies.
        first_last_layers_bf16: keep the first ``num_layers_at_start_in_bf16`` and the last
            ``num_layers_at_end_in_bf16`` blocks (not with delayed scaling).
        frozen: ``"keep"`` leaves Linears that do not train in high precision.
        fp8_eval: whether validation, test and prediction run in FP8 too.
        weight_cache: use quantised weights again within an optimizer step; they are kept where that happens.
        loss_scale: as in :class:`HalfMixed`; only for ``base="fp16"``.
        master_weights: as in :class:`HalfMixed`: weights in ``base`` with float32 masters.
        buffer_dtype: as in :class:`HalfMixed`.
        grad_reduce_dtype: as in :class:`HalfMixed`.
        grad_accumulation_dtype: as in :class:`HalfMixed`.

    Raises:
        ValueError: an unknown or contradictory option, or a model in which nothing converts.
        ImportError: Transformer Engine is not installed (ModuleNotFoundError) or does not import.
        RuntimeError: the device cannot run the recipe.
    """

    base: Base
    backend_is_chosen: bool = False
    """Whether the name in ``precision=`` left the backend to us."""
    choice: Any = None
    """What was converted and what was kept, of the module that was set up last."""

    def __init__(
        self,
        recipe: recipes.Kind | Mapping[str, Any] | Any = "delayed",
        *,
        fp8_format: Literal["hybrid", "e4m3"] | None = None,
        margin: int | None = None,
        amax_history_len: int | None = None,
        amax_compute_algo: Literal["max", "most_recent"] | None = None,
        reduce_amax: bool | None = None,
        override_linear_precision: tuple[bool, bool, bool] | None = None,
        interval: int | None = None,
        fp8_params: bool = False,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        base: Base = "bf16",
        norms: bool = True,
        fuse: Literal["auto", False] = False,
        keep: Sequence[str] = (),
        only: Sequence[str] | None = None,
        first_last_layers_bf16: bool = False,
        num_layers_at_start_in_bf16: int = 1,
        num_layers_at_end_in_bf16: int = 1,
        frozen: Literal["convert", "keep"] = "convert",
        fp8_eval: bool = True,
        weight_cache: bool = True,
        loss_scale: LossScaleChoice = "auto",
        master_weights: MasterWeights = False,
        buffer_dtype: torch.dtype | None = None,
        grad_reduce_dtype: torch.dtype | None = None,
        grad_accumulation_dtype: torch.dtype | None = None,
    ) -> None:
        check_base(base)
        dtypes = {"buffer_dtype": buffer_dtype, "grad_reduce_dtype": grad_reduce_dtype}
        masters = resolve_masters(base, master_weights, **dtypes, grad_accumulation_dtype=grad_accumulation_dtype)
        super().__init__(resolve_loss_scale(base, loss_scale), masters)
        require(support.MODULE, "FP8TE")
        fields: dict[str, Any] = {"fp8_format": fp8_format, "margin": margin, "amax_history_len": amax_history_len}
        fields |= {"amax_compute_algo": amax_compute_algo, "reduce_amax": reduce_amax, "interval": interval}
        fields |= {"fp8_dpa": fp8_dpa or None, "fp8_mha": fp8_mha or None, _OVERRIDE: override_linear_precision}
        self.recipe: Any = recipes.make_recipe(recipe, fields, "FP8TE")
        """The recipe object of Transformer Engine."""
        self.kind = recipes.kind_of(self.recipe)
        self.layers = LayerOptions(
            keep=keep,
            only=only,
            first_last_layers_bf16=first_last_layers_bf16,
            num_layers_at_start_in_bf16=num_layers_at_start_in_bf16,
            num_layers_at_end_in_bf16=num_layers_at_end_in_bf16,
            frozen=frozen,
        )
        self.base, self.norms, self.fp8_eval, self.weight_cache = base, norms, fp8_eval, weight_cache
        self.fp8_params = fp8_params
        self.fuse: Literal["auto", False] = fuse
        self.scales = DelayedScales(self.recipe, self._scaled_layers) if self.kind == "delayed" else None
        check_options(self)
        if fp8_params and masters is not None:
            masters.spared = self._weights_in_fp8
        name = _NAMES.get((self.kind, self.recipe.fp8_format.name), f"fp8-te-{self.kind}")
        self.precision = name + ("-fp16" if base == "fp16" else "")

    @property
    @override
    def autocast_dtype(self) -> torch.dtype:
        """``torch.bfloat16`` or ``torch.float16``: of everything that is no FP8 GEMM."""
        return DTYPES[self.base]

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        """``torch.int8``: Lightning's tables of peak rates list FP8's there."""
        return torch.int8

    @override
    def refusal(self, device: torch.device) -> str | None:
        """No Transformer Engine, no GPU, or one that cannot run the recipe: in Transformer Engine's own words."""
        reason = support.device_refusal(self.kind, device)
        if reason is None:
            return None
        if device.type != "cuda":
            return f"{reason}. 'fp8-hybrid-torchao' emulates FP8 on CPU"
        least = self.kind in ("delayed", "current", recipes.CUSTOM)
        works = "'bf16-mixed'" if least else "'fp8-current', 'fp8-hybrid-te'"
        return f"{reason}. Use {works}, or another GPU"

    @override
    def how(self, device: torch.device) -> str:
        """FP8 kernels of Transformer Engine."""
        return f"FP8 kernels of Transformer Engine on {describe(device)}"

    # ---- layers

    @override
    def _settle_pending(self) -> None:
        modules = alive(self._pending)
        super()._settle_pending()
        if self.fp8_params and self._sharded is None and gather_refusal(self.recipe) is None and self.fp8_eval:
            from lightning_lowprec.te.linear import store_frozen_in_fp8

            for module in modules:
                store_frozen_in_fp8(module, self._device or device_of(module))

    @override
    def _settle(self, module: Module, device: torch.device) -> None:
        refusal = self.refusal(device)
        if refusal is not None:
            raise RuntimeError(f"`precision={self.precision!r}` cannot run: {refusal}.")
        if self.backend_is_chosen:
            check_ranks_agree(self.precision, BACKEND)
        from lightning_lowprec.te.convert import Settings, convert_model

        unconvert(module, but=BACKEND)
        settings = Settings(
            recipe=self.recipe,
            layers=self.layers,
            norms=self.norms,
            fuse=self.fuse == "auto",
            fp8_eval=self.fp8_eval,
            weight_cache="always" if self.fp8_params else self.weight_cache,
        )
        found = convert_model(module, settings)
        self._check_choice(module, found)
        if found != self.choice:
            rank_zero_info(f"{self.precision}: {found.summary()}.")
        self.choice = found
        if self.scales is not None and device.type == "cuda":
            self.scales.expect()

    def _weights_in_fp8(self, module: Module) -> set[str]:
        """The parameters of ``module``, converted or not, that are kept in FP8 and train."""
        from lightning_lowprec.te.convert import choose

        alignment = recipes.alignment_of(self.recipe)
        layers = choose(module, self.layers, alignment=alignment, with_norms=self.norms).linears.converted
        parameters = dict(module.named_parameters(remove_duplicate=False))
        names = {f"{layer}.weight".lstrip(".") for layer in layers}
        return {fqn for fqn in names & parameters.keys() if parameters[fqn].requires_grad}  # weight_norm computes some

    def _check_choice(self, module: Module, found: Any) -> None:
        from lightning_lowprec.te.convert import scaled_layers

        own = [fqn for fqn, _ in scaled_layers(module)]
        if not found.converts and not own:
            raise ValueError(
                f"`precision={self.precision!r}` would convert none of the {len(found.linears.rows)} linear layers of"
                f" {type(module).__name__}, so nothing would run in FP8:\n{found.linears}\nUse a model with Linear"
                f" layers whose features are multiples of {recipes.alignment_of(self.recipe)}, or a"
                " precision without FP8 ('bf16-mixed', 'half-auto')."
            )
        te = support.pytorch("FP8TE")
        attention = any(isinstance(m, te.DotProductAttention) for m in module.modules())
        for field in ("fp8_dpa", "fp8_mha"):
            if getattr(self.recipe, field) and not attention:
                raise ValueError(
                    f"`{field}=True` is for Transformer Engine's own attention (`te.DotProductAttention`), and"
                    f" {type(module).__name__} has none; leave it out, or build the model with it."
                )

    @override
    def _check_optimizers(self, optimizers: list[Optimizer]) -> None:
        from lightning_lowprec.te.fusion.modules import FusedMLP, FusedModule
        from lightning_lowprec.te.linear import TELinear

        modules, sharded = alive(self._modules), self._sharded is not None
        fused = [
            child for module in modules for m in module.modules() if isinstance(m, FusedMLP) for child in m.modules()
        ]
        kinds = (TELinear, FusedModule)
        check_converted(modules, alive(self._unchecked), optimizers, kinds, also=fused, sharded=sharded)

    # ---- a step

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        """Autocast, and Transformer Engine's; amax is reduced over all ranks when it ends."""
        return self._in_both(super().forward_context())

    @contextmanager
    def _in_both(self, autocast: AbstractContextManager[Any]) -> Iterator[None]:
        if self.scales is not None:
            self.scales.restore()
        with autocast, support.pytorch("FP8TE").autocast(enabled=True, recipe=self.recipe):
            if self.scales is not None:
                self.scales.enter()
            yield
            if self.scales is not None:
                self.scales.leave()

    @override
    def optimizer_step(
        self,
        optimizer: Any,
        model: LightningModule | None = None,
        closure: Callable[[], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step; then renew the delayed scales of gradients."""
        output = super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if self.scales is not None:
            self.scales.after_step()
        return output

    # ---- state

    def _scaled_layers(self) -> list[tuple[str, Any]]:
        """By the number of the module that was set up, and the fqn in it."""
        from lightning_lowprec.te.convert import scaled_layers

        modules = dict.fromkeys(alive(self._modules))  # one that was set up again is one
        found = [(i, *entry) for i, m in enumerate(modules) for entry in scaled_layers(m)]
        return [(f"{i}.{fqn}".rstrip("."), layer) for i, fqn, layer in found]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The loss scale if there is one, the backend, and with delayed scaling its scales, as plain tensors."""
        delayed = {} if self.scales is None else self.scales.state()
        return {**super().state_dict(), "backend": BACKEND, **delayed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the loss scale, and the scales for the next forward; what has no use here is dropped, and logged."""
        if self.backend_is_chosen:
            check_resumes(self.precision, BACKEND, state_dict)
        super().load_state_dict(state_dict)
        if self.scales is not None:
            self.scales.load(state_dict)
        elif state_dict.get(SCALES):
            rank_zero_info(f"Dropped the delayed scales of the checkpoint: `precision={self.precision!r}` needs none.")
