"""Simulate the first training steps of a model on a GPU that is not there, and count the memory.

The model, the plugin of the precision, autograd and AdamW run on tensors that have no values. There are two steps,
because AdamW makes its state in the first, so that state and activations meet in the second.

A model is simulated with few of its equal blocks, and the figures are extended to all of them.
Every block adds the same to what lives at a moment of a step: its weights, gradients and state, and its activations
until its backward. So the peaks of the forward, the backward and the optimizer's step are straight lines over the
number of blocks. Two depths give the lines.

Of one rank of ``strategy="fsdp2"``, weights, gradients and state are computed and activations simulated.
"""

import copy
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torchmetrics import Metric

from lightning_lowprec import names
from lightning_lowprec.checks import Count, check_fields
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.name_formats import MASTERS, split
from lightning_lowprec.conversion.plan import make_plan
from lightning_lowprec.extras import replaced
from lightning_lowprec.fsdp2.options import blocks as blocks_of
from lightning_lowprec.numerics.one_pass import simulated
from lightning_lowprec.precision.base import LowPrecision
from lightning_lowprec.private.either import FabricHalf as HalfPrecision
from lightning_lowprec.private.either import FabricMixed as MixedPrecision
from lightning_lowprec.private.either import FabricPrecision as Precision
from lightning_lowprec.private.either import LightningModule
from lightning_lowprec.private.torch import tensors_of, tree_map_only
from lightning_lowprec.private.transformers import as_with_values, is_model
from lightning_lowprec.tools.fits.fake_gpu import FAKE, compiling_on_fakes, compute_again, fake_gpu
from lightning_lowprec.tools.fits.memory_meter import MemoryMeter, Peaks
from lightning_lowprec.tools.planning.costs import footprints, per_rank


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The batch and the loss of a model."""

    words: str
    batch: Callable[[int, int | None, torch.device], object]
    """Returns a batch without values: of so many rows, of so many tokens each."""
    loss: Callable[[nn.Module, object], Tensor]
    reads_sequences: bool = False
    """Whether the length of a sequence is asked for."""


def inputs_of(model: nn.Module, data: object = None) -> Inputs:
    """Return the batch and the loss that fit a model; ``data``: a batch of the user's, on CPU, rows first."""
    if data is not None:
        words = "shapes and dtypes of the first batch of the data, with as many rows as --batch says"
        loss = _training_step if isinstance(model, LightningModule) else _mean_of_output
        return Inputs(words=words, batch=partial(_rows_like, data), loss=loss)
    mean = "the mean of the output as loss"
    example = getattr(model, "example_input_array", None)
    if example is not None:
        words = f"`example_input_array`; {mean}"
        return Inputs(words=words, batch=partial(_rows_like, example), loss=_mean_of_output)
    of_transformers: Any = model if is_model(model) else None
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    if getattr(of_transformers, "main_input_name", "") != "input_ids" and not isinstance(first, nn.Embedding):
        raise ValueError(
            f"nothing tells what {type(model).__name__} reads. Name a LightningDataModule with `--data my.Data`, or"
            " give the model an `example_input_array`."
        )
    if of_transformers is None or of_transformers.get_output_embeddings() is None:
        return Inputs(words=f"token ids; {mean}", batch=_tokens, loss=_mean_of_output, reads_sequences=True)
    words = "token ids; the model's own loss"
    return Inputs(words=words, batch=_tokens, loss=_loss_of_language_model, reads_sequences=True)


def _tokens(size: int, sequence: Any, device: torch.device) -> Tensor:
    return torch.zeros(size, sequence, dtype=torch.long, device=device)


def _rows_like(example: object, size: int, sequence: int | None, device: torch.device) -> object:
    return tree_map_only(Tensor, lambda t: torch.zeros(size, *t.shape[1:], dtype=t.dtype, device=device), example)


def _loss_of_language_model(model: nn.Module, batch: object) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def _training_step(model: Any, batch: object) -> Tensor:
    output = model.training_step(batch, 0)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _mean_of_output(model: nn.Module, batch: object) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    tensors = [t for t in tensors_of(output) if t.requires_grad]
    if not tensors:
        raise ValueError("the model returned nothing that has a gradient, so there is no step to simulate.")
    return tensors[0].mean()


OPTIMIZER: Final = "optimizer"
_CUBLAS_ON_HOPPER, _CUBLAS_ELSEWHERE = 32 << 20, (8 << 20) + (128 << 10)
"""Bytes that torch keeps for cuBLAS, once for the thread of the forward, and once for that of the backward."""
LIGHTNINGS: Final[Mapping[str, Callable[[], Precision]]] = {
    "32-true": Precision,
    "bf16-mixed": partial(MixedPrecision, "bf16-mixed", FAKE.type),
    "bf16-true": partial(HalfPrecision, "bf16-true"),
}
"""Lightning's own precisions that are simulated."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model trains; a number below 1 raises ValueError."""

    precision: str
    batch: Count = 1
    """Sequences, images or rows of a step."""
    sequence: Count | None = None
    """Tokens of a sequence; None if the model reads none."""
    checkpointing: bool = False
    """Whether each block of the model is computed again in the backward."""
    fused: bool = False
    """Whether AdamW is fused; else torch's own choice on a GPU, one call for many parameters (foreach)."""
    capability: tuple[int, int] = (9, 0)
    devices: Count = 1
    """Ranks of ``strategy="fsdp2"``; :func:`simulate` simulates one GPU with the whole model."""

    def __post_init__(self) -> None:
        check_fields(self)


def refusal(precision: str) -> str | None:
    """Return why a precision cannot be simulated, and the remedy; None if it can."""
    if precision in LIGHTNINGS:
        return None
    row = names.TABLE.get(precision)
    if row is None:
        reason = f"only {', '.join(LIGHTNINGS)} of Lightning's own names are simulated"
    elif row.keeps_codes or row.backend == "transformer_engine":
        reason = f"the kernels of {backends.get(row.backend).title} do not run on tensors without values"
    else:
        return None
    return f"{reason}. Use `lowprec compare` on a GPU, which measures."


def simulate(model: nn.Module, inputs: Inputs, setting: Setting) -> Peaks:
    """Return the peak of every stretch of the training steps: bytes by category, as torch's allocator counts them.

    The model is on the meta device, and stays as it is. An operation that needs values raises ValueError.
    """
    meter, resize = MemoryMeter(), torch.UntypedStorage.resize_
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # what a plugin says of a run
        noting = replaced(torch.UntypedStorage, "resize_", lambda s, size: meter.resized(resize(s, size)))
        of_values = (simulated(), as_with_values(), fake_gpu(setting.capability), noting)
        for context in (*of_values, compiling_on_fakes(meter.paused), meter):
            stack.enter_context(context)
        try:
            _two_steps(_on_gpu(model, loaded_in_bf16(setting.precision)).train(), inputs, setting, meter)
        except RuntimeError as error:
            raise ValueError(
                f"the step of {type(model).__name__} cannot be simulated: {meter.operation} needs values, which"
                f" simulated tensors do not have, or fails ({str(error).splitlines()[0][:200]}). Leave the operation"
                " out of the training step, or measure on a GPU: `lowprec compare` reports the peak."
            ) from error
    peaks = {name: meter.peaks[name] for name in ("forward", "backward", OPTIMIZER)}
    of_cublas = 2 * (_CUBLAS_ON_HOPPER if setting.capability[0] == 9 else _CUBLAS_ELSEWHERE)
    return {name: {**peak, "temporaries": peak["temporaries"] + of_cublas} for name, peak in peaks.items()}


def loaded_in_bf16(precision: str) -> bool:
    """Return whether the model is taken to be bf16 before set-up, as documentation asks for."""
    row = names.TABLE.get(precision)
    masters = None if row is None else row.options.get("master_weights")
    return precision == "bf16-true" or masters == "8bit"


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
        compute_again(block)


def _two_steps(model: nn.Module, inputs: Inputs, setting: Setting, meter: MemoryMeter) -> None:
    row = None if setting.precision in LIGHTNINGS else names.TABLE[setting.precision]
    plugin: Precision = LIGHTNINGS[setting.precision]() if row is None else row.plugin(**row.options)
    if isinstance(plugin, LowPrecision):
        plugin.bind_device(FAKE)
        if reason := plugin.refusal(FAKE):
            raise ValueError(f"{reason}.")
        plugin.convert_module(model)
    if setting.checkpointing:
        checkpoint_blocks(model)
    optimizer = AdamW(model.parameters(), fused=setting.fused or None, foreach=not setting.fused or None)
    if isinstance(plugin, LowPrecision):
        plugin.see_optimizer(optimizer)
    meter.mark_living("state", but=())
    meter.mark([*model.parameters(), *model.buffers()], "weights")
    for weight in filter(lambda p: p.requires_grad, model.parameters()):
        weight.register_post_accumulate_grad_hook(lambda p: meter.mark([p.grad], "gradients"))  # type: ignore[no-untyped-call]
    batch = inputs.batch(setting.batch, setting.sequence, FAKE)
    for _ in range(2):
        _step(model, inputs, batch, plugin, meter, optimizer)


def _step(
    model: nn.Module, inputs: Inputs, batch: object, plugin: Precision, meter: MemoryMeter, optimizer: Optimizer
) -> None:
    meter.begin("forward", making="activations")
    with plugin.forward_context():
        loss = inputs.loss(model, plugin.convert_input(batch))
    optimizer.zero_grad()
    meter.begin("backward", making="temporaries")
    plugin.backward(loss, None)
    del loss
    meter.begin(OPTIMIZER, making="temporaries")
    plugin.optimizer_step(optimizer)
    meter.mark_living("state", but=("weights", "gradients"))


def _on_gpu(model: nn.Module, in_bf16: bool) -> nn.Module:
    """Return a copy of a model on the meta device whose tensors have memory on the simulated GPU; ties stay."""

    def on_gpu(tensor: Tensor, memo: object) -> Tensor:
        dtype = torch.bfloat16 if in_bf16 and tensor.is_floating_point() else tensor.dtype
        new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=FAKE)
        return nn.Parameter(new, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new

    with replaced(Tensor, "__deepcopy__", on_gpu), replaced(nn.Parameter, "__deepcopy__", on_gpu):
        copied = copy.deepcopy(model)
    for module in copied.modules():
        if isinstance(module, Metric):  # updates need values, and states are small
            of_metric = dict.fromkeys(("forward", "update", "compute"), lambda *_, **__: torch.zeros((), device=FAKE))
            vars(module).update(of_metric)
    return copied


DEPTHS: Final = (3, 4)  # numbers of blocks that are simulated


class Run(NamedTuple):
    """Equal blocks in a row: positions ``start`` to ``start + length - 1`` of the list at ``fqn``."""

    fqn: str
    start: int
    length: int


def longest_run(model: nn.Module) -> Run | None:
    """Return the equal blocks with the most parameters, or None if no list has more of them than are simulated."""
    runs: dict[Run, int] = {}
    for fqn, stack in model.named_modules():
        start = 0
        for _, same in groupby(stack if isinstance(stack, nn.ModuleList | nn.Sequential) else (), key=_shape):
            blocks = list(same)
            if len(blocks) > max(DEPTHS):
                runs[Run(fqn, start, len(blocks))] = sum(p.numel() for block in blocks for p in block.parameters())
            start += len(blocks)
    return max(runs, key=lambda run: runs[run], default=None)


def _shape(block: nn.Module) -> object:
    children = tuple((fqn, type(module)) for fqn, module in block.named_modules())
    return children, tuple((fqn, p.shape, p.dtype, p.requires_grad) for fqn, p in block.named_parameters())


@final
class Simulator:
    """Simulate settings of one model, on the meta device, which stays as it is; every setting once."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.inputs = inputs
        self.run = longest_run(model)
        self._model = model
        self._simulated: dict[str, Peaks] = {}

    def peaks(self, setting: Setting) -> Peaks:
        """Return the peak of every stretch of a step: bytes by category."""
        key = repr(setting)
        if key not in self._simulated:
            self._simulated[key] = self._simulate(setting) if setting.devices == 1 else self._of_one_rank(setting)
        return self._simulated[key]

    def _simulate(self, setting: Setting) -> Peaks:
        if self.run is None:
            return simulate(self._model, self.inputs, setting)
        few, more = (simulate(_cut(self._model, self.run, depth), self.inputs, setting) for depth in DEPTHS)
        times = (self.run.length - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])
        return {
            stretch: {name: round(size + times * (more[stretch][name] - size)) for name, size in peak.items()}
            for stretch, peak in few.items()
        }

    def _of_one_rank(self, setting: Setting) -> Peaks:
        """The shards stand under ``state``; gathered weights, and gradients on their way, under ``temporaries``."""
        precision, plan = setting.precision, make_plan(self._model)
        sizes = footprints(self._model, plan, precision)[-1:]
        ranks = per_rank(self._model, plan, sizes, shards=setting.devices)
        if not ranks:
            raise ValueError(f"`precision={precision!r}` does not run under strategy='fsdp2'.")
        peaks: Peaks = {}
        for stretch, on_one in self.peaks(replace(setting, devices=1, precision=_without_casts(precision))).items():
            own = on_one["temporaries"]
            peaks[stretch] = dict.fromkeys(on_one, 0)
            peaks[stretch]["state"] = round(ranks[0].state)
            peaks[stretch]["activations"] = on_one["activations"]
            peaks[stretch]["temporaries"] = own // setting.devices if stretch == OPTIMIZER else own + ranks[0].in_flight
        return peaks


def _cut(model: nn.Module, run: Run, depth: int) -> nn.Module:
    cut = slice(run.start + depth, run.start + run.length)
    stack: Any = model.get_submodule(run.fqn)
    left_out = {id(block): None for block in stack[cut]}
    copied = copy.deepcopy(model, left_out)  # blocks that are left out are not copied
    kept: Any = copied.get_submodule(run.fqn)
    del kept[cut]
    return copied


def _without_casts(precision: str) -> str:
    """Return the name whose weights have on one GPU the dtype in which FSDP2 gathers them: no casts are kept."""
    if precision in ("32-true", "bf16-true"):
        return precision
    stem, suffix = split(precision)
    row = names.TABLE.get(precision)
    if row is None or row.backend is None:
        return "bf16-sr"
    return f"{stem if suffix in MASTERS else precision}-sr"
