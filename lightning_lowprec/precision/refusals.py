"""Errors for models that a precision would train wrongly, raised at set-up."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_lowprec.conversion.experts import cut_by_expert
from lightning_lowprec.hardware import caution
from lightning_lowprec.masters.config import ACCUMULATES, IN_THE_STEP, MasterConfig
from lightning_lowprec.masters.in_backward import clipping_refused
from lightning_lowprec.masters.weights import HalfWeights
from lightning_lowprec.precision.host import callbacks_of, trainer_of
from lightning_lowprec.precision.loss_scale import LossScaler
from lightning_lowprec.private.either import MisconfigurationException, both, trainer_callbacks
from lightning_lowprec.private.lightning import sees_gradients

AVERAGING: Final = ("StochasticWeightAveraging", "WeightAveraging")  # lightning 2.6 added the second one


def check_runs(plugin: Any, device: torch.device) -> None:
    """Raise if the precision cannot run on ``device``; warn if in doubt."""
    refusal = plugin.refusal(device)
    if refusal is not None:
        raise RuntimeError(f"`precision={plugin.precision!r}` cannot run: {refusal}.")
    recipe = plugin.hardware_recipe
    if recipe is not None and not getattr(plugin, "emulate", None) and (doubt := caution(recipe, device)) is not None:
        rank_zero_warn(f"`precision={plugin.precision!r}`: {doubt}.")


def note_rounded(number: int, module: Module, precision: str) -> None:
    """Log the number of trainable parameters, if there are any, whose masters start from half-precision values."""
    if number:
        rank_zero_info(
            f"{precision}: {number} trainable parameters of {type(module).__name__} were half precision already, so"
            " their float32 values start from rounded values. Load the model in float32 (`dtype=torch.float32` of"
            " transformers' `from_pretrained`) to keep them exact."
        )


def refuse_sharded(module: Module, precision: str) -> None:
    """Raise for a model that is sharded already, because the precision can no longer convert or cast it.

    Expert parallelism is no reason: each rank has whole experts.
    """
    allowed = {id(p) for p in cut_by_expert(module)}
    cut = (fqn for fqn, p in module.named_parameters() if hasattr(p, "to_local") and id(p) not in allowed)
    fqn = next(cut, None)
    if fqn is not None:
        raise TypeError(
            f"`precision={precision!r}`: {type(module).__name__} is sharded already ({fqn!r} is a DTensor), so it can"
            " no longer be converted. If 'fsdp2' sharded it, under another precision or in an earlier set-up, build the"
            " model anew and load its checkpoint. Else leave sharding to `strategy='fsdp2'`, or keep"
            " `ModelParallelStrategy` and shard with `lightning_lowprec.parallelize(model, mesh, plugin)`. Only stacked"
            " experts may be cut already, by expert: load the model without `distributed_config`, and call"
            " `transformers.distributed.expert_parallel.apply_expert_parallelism`."
        )


def refuse_under_engine(keep_fp32: Sequence[str], where: str) -> None:
    """Raise ValueError if a model shall keep float32 tensors under an engine, which casts it."""
    if keep_fp32:
        raise ValueError(
            f"`keep_fp32={list(keep_fp32)!r}` is not possible under {where}, which casts every weight. Use"
            " `strategy='fsdp2'`, or leave it out."
        )


def refuse_skipping(scaler: LossScaler | None, masters: HalfWeights | None) -> None:
    """Raise if steps would be skipped whose updates are made during the backward pass."""
    if scaler is not None and masters is not None and masters.config.update != "step":
        raise ValueError(
            "`skip_nonfinite=True` does not go with `MasterConfig(update='backward')` ('bf16-lean', 'bf16-lean-sr'):"
            " weights are updated during the backward pass, before all gradients are known to be finite. Use"
            " `master_weights='8bit'`, which updates in the step."
        )


def refuse_averaging(callbacks: Iterable[Any], why: str) -> None:
    """Raise for Lightning's callbacks that average the model's parameters; ``why`` ends the message."""
    for callback in averaging(callbacks):
        raise MisconfigurationException(f"`{type(callback).__name__}` {why}")


def check_trainer(model: Any, config: MasterConfig, precision: str) -> None:
    """Warn of averages of half-precision weights; raise for what an update during the backward pass cannot do."""
    for callback in averaging(callbacks_of(model)):
        rank_zero_warn(
            f"`{type(callback).__name__}` averages the weights of the model, which `precision={precision!r}` keeps in"
            " half precision: the average is rounded whenever it is put into the model, for validation and at the end."
            " An average that moves slowly loses most of its way. Use a precision with float32 weights ('bf16-mixed',"
            " 'half-auto', 'fp8-hybrid'), or average the float32 masters in a callback of your own:"
            " `trainer.precision_plugin.main_params(optimizer)`."
        )
    trainer: Any = trainer_of(model)
    if config.update == "step" or trainer is None:
        return
    what = None
    kinds = both(trainer_callbacks.GradientAccumulationScheduler)
    schedules = [callback.scheduling.values() for callback in trainer.callbacks if isinstance(callback, kinds)]
    batches = max(trainer.accumulate_grad_batches, *(number for numbers in schedules for number in numbers), 1)
    if batches != 1 and config.update == "backward":
        what = (
            f"`accumulate_grad_batches={batches}` adds up gradients, and `update='backward'`"
            f" has used and freed each one. Use larger batches with activation checkpointing, or {ACCUMULATES}."
        )
    elif trainer.gradient_clip_val and (
        config.clip_tensor or config.update == "moments" or trainer.gradient_clip_algorithm == "value"
    ):
        what = clipping_refused(f"`gradient_clip_val={trainer.gradient_clip_val}` clips gradients")
    if what is not None:
        raise MisconfigurationException(f"`precision={precision!r}`: {what}")
    if sees_gradients(model):
        rank_zero_warn(
            f"`precision={precision!r}`: your module or a callback has `configure_gradient_clipping` or"
            " `on_before_optimizer_step`, which run when gradients are used and freed: `p.grad` is None, and"
            " `torch.nn.utils.clip_grad_norm_` clips nothing. `self.clip_gradients` clips by the norm so far. Use"
            f" {IN_THE_STEP}."
        )


def say_updates_in_step(module: Any, config: MasterConfig, precision: str) -> None:
    """Log that DDP moves the updates of ``update="backward"`` into the step, and what this costs."""
    if config.update != "step" and isinstance(module, DistributedDataParallel):
        rank_zero_info(
            f"{precision}: under DDP weights are updated in the step, not during the backward pass, because DDP"
            " averages gradients in buckets that it keeps: 2 bytes per parameter more. `strategy='fsdp2'` updates"
            " during the backward pass."
        )


def averaging(callbacks: Iterable[Any]) -> list[Any]:
    """Return the callbacks that are Lightning's for averages of weights."""
    kinds = both(*(getattr(trainer_callbacks, name) for name in AVERAGING if hasattr(trainer_callbacks, name)))
    return [callback for callback in callbacks if isinstance(callback, kinds)]
