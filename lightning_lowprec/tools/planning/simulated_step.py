"""Simulate the first training steps of a model on a GPU that is not there, and count the memory.

The model, the plugin of the precision, autograd and AdamW run on tensors that have no values, in the order of the
Trainer: gradients live until the next backward. There are two steps, because AdamW makes its state in the first step,
so that state and activations meet in the second.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from lightning_lowprec import names
from lightning_lowprec.fsdp2.options import blocks as blocks_of
from lightning_lowprec.masters.config import MasterConfig
from lightning_lowprec.numerics.one_pass import simulated
from lightning_lowprec.private.either import FabricHalf as HalfPrecision
from lightning_lowprec.private.either import FabricMixed as MixedPrecision
from lightning_lowprec.private.either import FabricPrecision as Precision
from lightning_lowprec.private.either import LightningModule
from lightning_lowprec.private.fake_gpu import (
    FAKE,
    NEEDS_VALUES,
    compiling_on_fakes,
    fake_gpu,
    noting_resized,
    tensors_of,
)
from lightning_lowprec.private.torch import tree_map_only
from lightning_lowprec.private.transformers import as_with_values, is_model
from lightning_lowprec.tools.planning.memory_meter import (
    ACTIVATIONS,
    GRADIENTS,
    STATE,
    TEMPORARIES,
    WEIGHTS,
    MemoryMeter,
    Peaks,
    cublas,
)

SET_UP, FORWARD, BACKWARD, OPTIMIZER = "set-up", "forward", "backward", "optimizer"
STEPS: Final = 2
LIGHTNINGS: Final[Mapping[str, Callable[[], Precision]]] = {
    "32-true": Precision,
    "bf16-mixed": partial(MixedPrecision, "bf16-mixed", FAKE.type),
    "bf16-true": partial(HalfPrecision, "bf16-true"),
}
"""Lightning's own precisions that are simulated."""
_MEASURED: Final = "Use `lowprec compare` on a GPU, which measures."


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model trains."""

    precision: str
    """A name for ``precision=``."""
    batch: int = 1
    """Sequences, images or rows of a step."""
    sequence: int | None = None
    """Tokens of a sequence; None if the model reads none."""
    checkpointing: bool = False
    """Whether each block of the model is computed again in the backward."""
    fused: bool = False
    """Whether AdamW is fused; else torch's own choice on a GPU, one call for many parameters (foreach)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plugin, such as ``{"head": "chunked"}``."""
    capability: tuple[int, int] = (9, 0)
    """The compute capability of the GPU."""
    devices: int = 1
    """Ranks of ``strategy="fsdp2"``; :func:`simulate` simulates one GPU with the whole model."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The batch and the loss of a model."""

    words: str
    """The batch and the loss, in words."""
    batch: Callable[[int, int | None, torch.device], Any]
    """Returns a batch without values: of so many rows, of so many tokens each."""
    loss: Callable[[nn.Module, Any], Tensor]
    reads_sequences: bool = False
    """Whether the length of a sequence is asked for."""


def refusal(precision: str) -> str | None:
    """Return why a precision cannot be simulated, and the remedy; None if it can."""
    if precision in LIGHTNINGS:
        return None
    if precision not in names.TABLE:
        return f"only {', '.join(LIGHTNINGS)} of Lightning's own names are simulated. {_MEASURED}"
    row = names.resolve(precision)
    if row.backend == "transformer_engine":
        return (
            "the kernels of Transformer Engine do not run on tensors without values. 'fp8-tensorwise' (torchao) is"
            f" simulated. {_MEASURED}"
        )
    if row.keeps_codes:
        return f"MS-AMP's tensors of codes need values. `lowprec plan` shows their bytes at rest. {_MEASURED}"
    return None


def simulate(model: nn.Module, inputs: Inputs, setting: Setting, blocks: Mapping[str, int] | None = None) -> Peaks:
    """Return the peak of every stretch of the training steps: bytes by category, as torch's allocator counts them.

    The simulation changes the model, which is on the meta device. ``blocks`` has the number of each block by the
    beginning of its parameters' fqns, for a stretch of the backward each. An operation that needs values raises
    ValueError; a private name that torch has moved ImportError.
    """
    if setting.precision == "bf16-true":
        model.bfloat16()  # Lightning makes the model so
    if loaded_in_half(setting.precision):
        for parameter in model.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.bfloat16()
    meter = MemoryMeter()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # what a plugin says of a run
        of_values = (simulated(), as_with_values(), fake_gpu(setting.capability), noting_resized(meter.resized))
        for context in (*of_values, compiling_on_fakes(meter.paused), meter):
            stack.enter_context(context)
        meter.begin(SET_UP, making=STATE)
        _to_gpu(model)
        if setting.checkpointing:
            checkpoint_blocks(model)
        try:
            return _steps(model.train(), inputs, setting, meter, blocks or {})
        except NEEDS_VALUES as error:
            raise ValueError(
                f"the step of {type(model).__name__} cannot be simulated: {meter.operation} needs values, and"
                f" simulated tensors have none ({str(error).splitlines()[0][:200]}). Leave the operation out of the"
                " training step, or measure on a GPU: `lowprec compare` reports the peak."
            ) from error


def loaded_in_half(precision: str) -> bool:
    """Return whether the model is taken to be bf16 before set-up: float32 weights would take more than a whole step."""
    row = names.TABLE.get(precision)
    masters = None if row is None else row.options.get("master_weights")
    return masters == "8bit" or (isinstance(masters, MasterConfig) and masters.update != "step")


def checkpoint_blocks(model: nn.Module) -> None:
    """Compute blocks again in the backward, in place: by the switch of transformers, else the repeated blocks."""
    for module in filter(is_model, model.modules()):
        if getattr(module, "supports_gradient_checkpointing", False):
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
            return
    blocks = blocks_of(model).values()
    if not blocks:
        raise ValueError(
            f"`checkpointing=True` found no repeated blocks in {type(model).__name__} (children of one class in an"
            " nn.ModuleList or nn.Sequential). Checkpoint inside the model, and leave the option out."
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _steps(model: nn.Module, inputs: Inputs, setting: Setting, meter: MemoryMeter, blocks: Mapping[str, int]) -> Peaks:
    row = None if setting.precision in LIGHTNINGS else names.resolve(setting.precision)
    plugin: Any = LIGHTNINGS[setting.precision]() if row is None else row.plugin(**{**row.options, **setting.options})
    if row is not None:
        plugin.bind_device(FAKE)
        plugin.convert_module(model)
    optimizer = AdamW(model.parameters(), fused=setting.fused or None, foreach=not setting.fused or None)
    if row is not None:
        plugin.see_optimizer(optimizer)
    meter.mark([*model.parameters(), *model.buffers()], WEIGHTS)
    _watch_gradients(model, meter, blocks)
    batch = inputs.batch(setting.batch, setting.sequence, FAKE)
    for _ in range(STEPS):
        _step(model, inputs, batch, plugin, meter, optimizer)
    extra = cublas(setting.capability)
    return {name: {**peak, TEMPORARIES: peak[TEMPORARIES] + extra} for name, peak in meter.peaks.items()}


def _step(model: nn.Module, inputs: Inputs, batch: Any, plugin: Any, meter: MemoryMeter, optimizer: Optimizer) -> None:
    meter.begin(FORWARD, making=ACTIVATIONS)
    with plugin.forward_context():
        on, dtype = torch.is_autocast_enabled(FAKE.type), torch.get_autocast_dtype(FAKE.type)
        with torch.autocast(FAKE.type, dtype=dtype, enabled=on, cache_enabled=False):  # as in the Trainer
            loss = inputs.loss(model, plugin.convert_input(batch))
    optimizer.zero_grad()
    meter.begin(BACKWARD, making=TEMPORARIES)
    plugin.backward(loss, None)
    del loss
    meter.begin(OPTIMIZER, making=TEMPORARIES)
    plugin.optimizer_step(optimizer)
    meter.mark_living(STATE, but=(WEIGHTS, GRADIENTS))


def _watch_gradients(model: nn.Module, meter: MemoryMeter, blocks: Mapping[str, int]) -> None:
    """Mark gradients, and begin a stretch with the first gradient of every block."""

    def note(number: int | None, parameter: Tensor) -> None:
        if parameter.grad is not None:
            meter.mark([parameter.grad], GRADIENTS)
        stretch = BACKWARD if number is None else f"{BACKWARD} {number}"
        if number is not None and meter.stretch != stretch:
            meter.begin(stretch, making=TEMPORARIES)

    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = next((number for start, number in blocks.items() if fqn.startswith(start)), None)
            parameter.register_post_accumulate_grad_hook(partial(note, number))  # type: ignore[no-untyped-call]


def _to_gpu(model: nn.Module) -> None:
    """Give every tensor of a model on the meta device memory on the simulated GPU; ties and flags stay."""
    moved: dict[int, Tensor] = {}

    def on_gpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in moved:
            new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=FAKE)
            is_parameter = isinstance(tensor, nn.Parameter)
            moved[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_parameter else new
        return moved[id(tensor)]

    for module in model.modules():
        if isinstance(module, Metric):  # updates need values, and states are small
            of_metric = dict.fromkeys(("forward", "update", "compute"), lambda *_, **__: torch.zeros((), device=FAKE))
            vars(module).update(of_metric)
        dicts = (value for value in vars(module).values() if isinstance(value, dict))  # torchmetrics' defaults too
        for attributes in [vars(module), *dicts]:
            for name, value in list(attributes.items()):
                if isinstance(value, Tensor):
                    attributes[name] = on_gpu(value)


# ---- the batch and the loss


def inputs_of(model: nn.Module, data: Any = None) -> Inputs:
    """Return the batch and the loss that fit a model; ``data``: a batch of the user's, on CPU, rows first."""
    if data is not None:
        loss = _training_step if isinstance(model, LightningModule) else _mean_of_output
        return Inputs(words="a batch of the data", batch=partial(_rows_like, data), loss=loss)
    example = getattr(model, "example_input_array", None)
    if example is not None:
        words = "`example_input_array`; the mean of the output as loss"
        return Inputs(words=words, batch=partial(_rows_like, example), loss=_mean_of_output)
    of_transformers: Any = model if is_model(model) else None
    reads_tokens = getattr(of_transformers, "main_input_name", "") == "input_ids"
    if reads_tokens and of_transformers.get_output_embeddings() is not None:
        words = "token ids; the model's own loss"
        return Inputs(words=words, batch=_tokens, loss=_loss_of_language_model, reads_sequences=True)
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    if reads_tokens or isinstance(first, nn.Embedding):
        words = "token ids; the mean of the output as loss"
        return Inputs(words=words, batch=_tokens, loss=_mean_of_output, reads_sequences=True)
    raise ValueError(
        f"nothing tells what {type(model).__name__} reads. Name a LightningDataModule with `--data my.Data`, or give"
        " the model an `example_input_array`."
    )


def _tokens(size: int, sequence: int | None, device: torch.device) -> Tensor:
    assert sequence is not None
    return torch.zeros(size, sequence, dtype=torch.long, device=device)


def _rows_like(example: Any, size: int, sequence: int | None, device: torch.device) -> Any:
    def rows(t: Tensor) -> Tensor:
        return torch.zeros(size, *t.shape[1:], dtype=t.dtype, device=device)

    return tree_map_only(Tensor, rows, example)


def _loss_of_language_model(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def _training_step(model: Any, batch: Any) -> Tensor:
    output = model.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, Mapping) else output
    assert isinstance(loss, Tensor)
    return loss


def _mean_of_output(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    tensors = [t for t in tensors_of(output) if t.requires_grad]
    if not tensors:
        raise ValueError("the model returned nothing that has a gradient, so there is no step to simulate.")
    return tensors[0] if tensors[0].ndim == 0 else tensors[0].mean()
