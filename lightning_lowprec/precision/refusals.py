"""Errors for models that a precision would train wrongly, raised at set-up."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch
from torch.nn import Module

from lightning_lowprec.conversion.experts import cut_by_expert
from lightning_lowprec.hardware import caution
from lightning_lowprec.messages import warn
from lightning_lowprec.precision.host import callbacks_of, trainer_of
from lightning_lowprec.private.either import MisconfigurationException, both, trainer_callbacks
from lightning_lowprec.private.lightning import traces

if TYPE_CHECKING:
    from lightning_lowprec.precision.base import LowPrecision

AVERAGING: Final = ("StochasticWeightAveraging", "WeightAveraging")  # lightning 2.6 added the second one


def check_runs(plugin: "LowPrecision", device: torch.device) -> None:
    """Raise if the precision cannot run on ``device``; warn if in doubt."""
    refusal = plugin.refusal(device)
    if refusal is not None:
        raise RuntimeError(f"`precision={plugin.precision!r}` cannot run: {refusal}.")
    recipe = plugin.hardware_recipe
    if recipe is not None and not plugin.emulate and (doubt := caution(recipe, device)) is not None:
        warn(f"`precision={plugin.precision!r}`: {doubt}.")


@functools.cache  # asked in every forward
def two_dtypes(precision: str, dtype: torch.dtype) -> str:
    """Return how to mend an operation that gets float32 beside a weight in half precision."""
    return (
        f"Under `precision={precision!r}` weights are {dtype}; batches, and what a program computes with autocast"
        " switched off, are float32. Cast the input of the operation (`x.to(weight.dtype)`), keep the weight float32"
        " (`keep_fp32=['name of the module']`), or have the whole batch cast: `master_weights=..., cast_inputs=True`."
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


def refuse_graph(model: Module, precision: str) -> None:
    """Raise if a logger will trace a model that has layers or weights in low precision."""
    if (trainer := trainer_of(model)) is not None and traces(trainer, model):
        raise MisconfigurationException(
            "With `log_graph=True` TensorBoardLogger traces the model by `torch.jit.trace`, which does not go with the"
            f" layers and weights of `precision={precision!r}`. Write `log_graph=False`; to get the picture, run one"
            " step under 'bf16-mixed'."
        )


def refuse_averaging(callbacks: Iterable[object], why: str) -> None:
    """Raise for Lightning's callbacks that average the model's parameters; ``why`` ends the message."""
    for callback in averaging(callbacks):
        raise MisconfigurationException(f"`{type(callback).__name__}` {why}")


def warn_of_averages(model: Module, precision: str) -> None:
    """Warn of averages of half-precision weights."""
    for callback in averaging(callbacks_of(model)):
        warn(
            f"`{type(callback).__name__}` averages the weights of the model, which `precision={precision!r}` keeps in"
            " half precision: the average is rounded whenever it is put into the model, for validation and at the end."
            " An average that moves slowly loses most of its way. Use a precision with float32 weights ('bf16-mixed',"
            " 'half-auto', 'fp8-hybrid'), or average the float32 masters in a callback of your own:"
            " `trainer.precision_plugin.main_params(optimizer)`."
        )


def refuse_unfreezing(module: Module) -> None:
    """Raise for callbacks that train or average what ``frozen="codes"`` stores as codes."""
    callbacks, instead = callbacks_of(module), "needs values, and `frozen='codes'` has none. Use `frozen='convert'`."
    refuse_averaging(callbacks, instead)
    for callback in callbacks:
        if isinstance(callback, both(trainer_callbacks.BaseFinetuning)):
            raise MisconfigurationException(f"`{type(callback).__name__}` unfreezes weights, which {instead}")


def averaging(callbacks: Iterable[object]) -> list[object]:
    """Return the callbacks that are Lightning's for averages of weights."""
    kinds = both(*(getattr(trainer_callbacks, name) for name in AVERAGING if hasattr(trainer_callbacks, name)))
    return [callback for callback in callbacks if isinstance(callback, kinds)]
