"""The modules and optimizers that a plugin has set up, and what is checked once before their first step.

Conversion, sharding and users replace parameters. An optimizer that was built before the replacement holds stale
parameters, which no model has any more. The model would then train without learning. The check raises instead. A weight
that no optimizer was given, as in linear probing, trains as in stock Lightning, with a warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, Final, final

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_lowprec.conversion import head, layer_runs
from lightning_lowprec.conversion.matmuls import linears
from lightning_lowprec.conversion.plan import NOT_CALLED
from lightning_lowprec.hardware import caution, default_device, refusal
from lightning_lowprec.masters.float32_values import is_marked
from lightning_lowprec.masters.registry import registries, registry_of
from lightning_lowprec.masters.stores import Fp32Store
from lightning_lowprec.messages import in_units, info, warn
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import WeakList, WeakNumbers, parameters_of
from lightning_lowprec.precision import refusals
from lightning_lowprec.precision.host import device_of, trainer_of
from lightning_lowprec.private.torch import local_tensor, version_of
from lightning_lowprec.private.torch_optimizers import brings_masters
from lightning_lowprec.private.torchao import parameters_of_copies

if TYPE_CHECKING:
    from lightning_lowprec.precision.base import LowPrecision


@final
class Modules:
    """The modules of one plugin, from their set-up to the check of their optimizers.

    A module is prepared (converted, cast) as soon as the device is known. The first of these sources gives the device:

    1. the strategy: :meth:`bind`, before any module is moved;
    2. the parameters of the first module: at once if they will not be moved any more, else at the first forward;
    3. the device that Lightning would choose, if a forward runs without any module.
    """

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.sharded: weakref.WeakSet[Module] | None = None
        """The modules that FSDP2 has sharded; None: this plugin does not run under FSDP2."""
        self.replicated = False  # whether DDP has wrapped a module
        self.ready = False  # whether the device is known and no module waits
        self.need_check = False
        """Whether a module was prepared since the last check of optimizers, even if this module no longer exists."""
        self.unsettled = False  # whether :func:`settle_weights` waits for the optimizers
        self.watched_backwards = 0  # how many of the next backward passes are looked at (:func:`look_at_layers`)
        self.frozen_writes = FrozenWrites()
        self.groups_seen: WeakNumbers[Optimizer] = WeakNumbers()
        """Each optimizer that has stepped, and its number of groups: a program that adds layers changes one."""
        self.linears: WeakList[Module] = WeakList()  # those that were there at the set-up
        self.waiting: WeakList[Module] = WeakList()  # the modules that were set up and are not prepared yet
        self.prepared: WeakList[Module] = WeakList()
        self.unchecked: WeakList[Module] = WeakList()
        """The prepared modules whose optimizers have not been checked since."""

    def bind(self, device: torch.device) -> None:
        """Set the device that the modules will run on."""
        self.device = device
        self.ready = not self.waiting

    def note_sharded(self, *modules: Module) -> None:
        """Note that FSDP2 has sharded ``modules``, or without any that FSDP2 will shard."""
        self.sharded = weakref.WeakSet([*(self.sharded or ()), *modules])

    def add(self, module: Module) -> bool:
        """Add a module that waits for its preparation; return whether the device is known and preparation can begin."""
        self.waiting.add(module)
        self.ready = False
        may_still_move = default_device().type != "cpu" and device_of(module).type == "cpu"
        return self.device is not None or not may_still_move

    def take_waiting(self) -> Iterator[tuple[Module, torch.device]]:
        """Yield every waiting module with its device; note a module as prepared when the caller asks for the next."""
        waiting, self.waiting = self.waiting, WeakList()
        for module in waiting:
            self.device = self.device or device_of(module)
            yield module, self.device
            self.prepared.add(module)
            self.unchecked.add(module)
            self.need_check = self.unsettled = True
            self.watched_backwards = 2
            self.linears = WeakList([*self.linears, *linears(module).values()])
            layer_runs.await_runs(module)
        self.device = self.device or default_device()
        self.ready = True

    def note_check(self) -> None:
        """Note that the optimizers of every prepared module have been checked."""
        self.unchecked = WeakList()
        self.need_check = False

    def __getstate__(self) -> dict[str, object]:
        empty: dict[str, object] = {
            "sharded": None,
            "groups_seen": WeakNumbers(),
            "ready": False,
            "need_check": False,
            "unsettled": False,
        }
        return {**self.__dict__, **empty}


def check_optimizers(plugin: LowPrecision, optimizers: list[Optimizer]) -> None:
    """Warn if a trainable weight of a converted layer is in no optimizer; raise if one holds a stale weight."""
    modules = plugin.modules
    if (reshard := plugin.reshard) is not None:
        for module in modules.prepared:
            reshard(module)
    current = {id(p) for module in modules.prepared for p in module.parameters()}
    for module in modules.unchecked:
        converted = {id(p) for layer in plugin._converted_layers(module) for p in layer.parameters(recurse=False)}
        _check_module(module, converted, optimizers, current)


def _check_module(module: Module, converted: Set[int], optimizers: list[Optimizer], current: Set[int]) -> None:
    """Warn if a trainable parameter of a converted layer is in no optimizer; raise if it was replaced.

    A module of which the optimizers hold nothing passes: it may be a teacher, or get its optimizer later. An
    ``AveragedModel`` passes too: its weights are averages. ``converted`` and ``current`` are ids of parameters: of the
    converted layers of this module, and of all modules.
    """
    parameters = dict(module.named_parameters())
    trained = {id(p): p for o in optimizers for p in parameters_of_copies(o) or parameters_of(o)}
    averages = {id(p) for m in module.modules() if isinstance(m, AveragedModel) for p in m.parameters()}
    untrained = converted - trained.keys() - averages
    missing = {fqn: p for fqn, p in parameters.items() if id(p) in untrained and p.requires_grad}
    if not missing:
        return
    fqn, parameter = next(iter(missing.items()))
    names = repr(fqn) + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
    if any(key not in current and p.shape == parameter.shape for key, p in trained.items()):
        raise RuntimeError(
            f"{names} is in no optimizer, but an optimizer holds a parameter of its shape that no module has: it was"
            " built from parameters that have been replaced since. Build the optimizer after the last change to the"
            " model, from `model.parameters()`."
        )
    if any(id(p) in trained for p in parameters.values()):
        warn(
            f"{names} is trainable and in no optimizer: it gets gradients and never learns. Freeze it with"
            " `requires_grad_(False)`, which saves its gradients, or add it to an optimizer."
        )


def set_up_heads(plugin: LowPrecision, module: Module, device: torch.device) -> None:
    """Replace the heads and losses of the causal models in ``module``, in place, or say what they cost on a GPU."""
    if plugin.head == "bf16":
        for sentence in head.advice(module) if device.type == "cuda" and plugin.engine is None else ():
            info(f"{plugin.precision}: {sentence}.")
        return
    emulate = plugin.emulate
    if plugin.head == "fp8" and not emulate:
        if (reason := refusal("fp8-head", device)) is not None:
            raise RuntimeError(f"`head='fp8'` cannot run: {reason}. Use `head='chunked'`.")
        if (doubt := caution("fp8-head", device)) is not None:
            warn(f"`head='fp8'`: {doubt}.")
    fqns = head.replace_heads(module, plugin.head, emulate, plugin.fast_accum)
    where = ", ".join(repr(fqn) if fqn else type(module).__name__ for fqn in fqns)
    info(
        f"{plugin.precision}: head={plugin.head!r} computes the loss of {where} from hidden states, without all logits."
    )


# ---- before the first step


def before_training(plugin: LowPrecision, model: Module, optimizers: Sequence[Optimizer], *, will_train: bool) -> None:
    """Prepare all optimizers of the Trainer, and check them; without training they are those of an earlier fit."""
    if will_train:
        if plugin.masters is not None:
            refusals.warn_of_averages(model, plugin.precision)
        for optimizer in optimizers:
            plugin._prepare_optimizer(optimizer)
        settle_weights(plugin, all_known=True)
        check_optimizers(plugin, list(optimizers))
    plugin.modules.note_check()


def before_step_in_fabric(plugin: LowPrecision, optimizer: Optimizer) -> None:
    """Prepare and check before the first step of ``optimizer`` after a set-up of modules by Fabric."""
    if plugin.optimizers:
        check_optimizers(plugin, [*plugin.optimizers, optimizer])
    plugin._prepare_weights_of(optimizer)  # with `plugins=`, the optimizer was not known before
    if plugin.masters is not None:
        if plugin.modules.sharded is not None and not list(plugin.modules.sharded):
            raise RuntimeError(
                f"`precision={plugin.precision!r}` keeps its weights in half precision, but the model was sharded"
                " without it. Use `strategy='fsdp2'`, or shard with `lightning_lowprec.parallelize(model, mesh,"
                " plugin)`."
            )
        settle_weights(plugin)
    plugin.modules.note_check()


def see_groups(plugin: LowPrecision, optimizer: Optimizer) -> None:
    """Look at an optimizer, or a group of parameters, that is new: the program may have changed the model too."""
    plugin.modules.groups_seen[optimizer] = len(optimizer.param_groups)
    if plugin.masters is not None and registry_of(optimizer) is None and not brings_masters(optimizer):
        _take_new(plugin, optimizer)
    if plugin.backend is not None:
        _warn_of_late_layers(plugin)


def _take_new(plugin: LowPrecision, optimizer: Optimizer) -> None:
    """Prepare an optimizer that the program has made since training began, with the others of its Trainer."""
    trainers = [trainer for module in plugin.modules.prepared if (trainer := trainer_of(module)) is not None]
    optimizers = [*(trainers[-1].optimizers if trainers else ()), optimizer]
    for each in optimizers:
        plugin._prepare_optimizer(each)
    if trainers:  # the values of earlier masters have been taken over
        plugin.after_fit.optimizers = optimizers


def _warn_of_late_layers(plugin: LowPrecision) -> None:
    """Warn of linear layers that came into a model after its set-up, and so did not convert."""
    modules = plugin.modules
    known = {id(module) for module in modules.linears}
    found = {fqn: m for model in modules.prepared for fqn, m in linears(model).items() if id(m) not in known}
    modules.linears = WeakList([*modules.linears, *found.values()])
    if found:
        warn(
            f"`precision={plugin.precision!r}`: {_first(list(found), 4)} came into the model after its set-up. Layers"
            f" convert at the set-up alone, so these do not run in {plugin.format}. Build them before `fit` or"
            " `fabric.setup`; or end this `fit` after the change and begin another one."
        )


def settle_weights(plugin: LowPrecision, *, all_known: bool | None = None) -> None:
    """Let weights that no optimizer took be float32 again, or keep their float32 values in host memory.

    Once per set-up: the Trainer knows its optimizers; in Fabric before the first forward, if ``setup`` was given any,
    since an average may be written before the first step; else before that step, with the float32 values kept. FSDP2
    takes one dtype per group, and DDP has made buckets by dtype: there, weights stay in half precision.
    """
    waits, plugin.modules.unsettled = plugin.modules.unsettled, False
    if plugin.masters is None or not waits:
        return
    known = bool(plugin.optimizers) if all_known is None else all_known
    widen = known and plugin.modules.sharded is None and not plugin.modules.replicated
    if size := plugin.masters.settle(plugin.modules.prepared, widen=widen):
        kept = "weights that do not train keep their float32 values in host memory"
        info(f"{plugin.precision}: {kept}, {in_units(size)}.")


# ---- writes that are lost

LOOKS: Final = (1, 2, 32)  # steps of optimizers before which weights are looked at; the second and third compare


@final
class FrozenWrites:
    """Warn once each of lost writes: to frozen half-precision weights, and through ``.data`` past float32 masters.

    A teacher that is averaged by hand, ``t.mul_(0.999).add_(s, alpha=0.001)``, stays where it is in bf16. Versions,
    places and 64 values of a weight tell of writes.
    """

    def __init__(self) -> None:
        self.steps = 0  # that were counted
        self._weights: dict[str, tuple[int, int, int, Tensor]] = {}  # identity, version, place, values

    def look(self, plugin: LowPrecision) -> None:
        """Look at the weights of a plugin with masters before a step, one of :data:`LOOKS`."""
        optimizers = (*plugin.optimizers, *plugin.after_fit.optimizers)
        stores = [store for o in optimizers if (registry := registry_of(o)) is not None for store in registry.stores]
        edits = [edit for store in stores if isinstance(store, Fp32Store) for edit in store.unseen_edits()]
        trained = {id(p) for o in optimizers for p in parameters_of(o)}
        trained.update(key for registry in registries for key in registry.place_of)
        named = {fqn: p for model in plugin.modules.prepared for fqn, p in model.named_parameters()}
        cast = {fqn: p for fqn, p in named.items() if p.dtype in HALF_DTYPES and is_marked(p) and not is_lazy(p)}
        frozen = {fqn: p for fqn, p in cast.items() if id(p) not in trained}
        before, self._weights = self._weights, {fqn: _look(p) for fqn, p in frozen.items()}
        same = {
            fqn: (old, new)
            for fqn, new in self._weights.items()
            if (old := before.get(fqn)) is not None and old[0] == new[0] and old[3].device == new[3].device
        }
        flags = [flag for _, flag in edits] + [(old[3] != new[3]).any() for old, new in same.values()]
        differ = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []  # waits once
        undone = {id(p) for (p, _), flag in zip(edits, differ, strict=False) if flag}
        moved = zip(same.items(), differ[len(edits) :], strict=True)
        lost = [fqn for (fqn, (old, new)), flag in moved if flag or old[1:3] != new[1:3]]
        _warn(plugin, lost, f", which no optimizer holds and which became {plugin.autocast_dtype}: small changes are"
              f" rounded away. Keep such weights float32 by the option `keep_fp32={lost[:1]}` of"
              f" {type(plugin).__name__}; the name of their module does too.")  # fmt: skip
        _warn(plugin, [fqn for fqn, p in named.items() if id(p) in undone], " in place through `.data`, which float32"
              " masters cannot see: the next step undoes it. Write to the parameter itself under `torch.no_grad()`, or"
              " use `master_weights='remainder'`.")  # fmt: skip
        self.steps = LOOKS[-1] if lost or undone else self.steps

    def __reduce__(self) -> tuple[type[FrozenWrites], tuple[()]]:
        return type(self), ()  # the weights stay in their process


def _look(parameter: Tensor) -> tuple[int, int, int, Tensor]:
    local = local_tensor(parameter).detach()
    values = local.view(-1)[:: max(1, local.numel() // 64)][:64] if local.is_contiguous() else local.new_zeros(1)
    return id(parameter), version_of(parameter), local.data_ptr(), values.clone().view(torch.int16)


def _warn(plugin: LowPrecision, fqns: Sequence[str], why: str) -> None:
    if fqns:
        warn(f"`precision={plugin.precision!r}`: the program writes to {_first(fqns, 1)}{why}")


def _first(fqns: Sequence[str], most: int) -> str:
    more = f" and {len(fqns) - most} more" if len(fqns) > most else ""
    return ", ".join(map(repr, fqns[:most])) + more


def look_at_layers(plugin: LowPrecision) -> None:
    """Look after one of the first backward passes, and warn of layers whose weight was read without a call."""
    modules = plugin.modules
    modules.watched_backwards -= 1
    for model in modules.prepared:
        found = layer_runs.read_without_call(model)
        if found:
            warn(_warning(plugin, list(found)))
            if plugin.plan is not None:  # of the module that was set up last
                plugin.plan = plugin.plan.without(layer_runs.not_called(list(modules.prepared)[-1]))
        if found or not modules.watched_backwards:
            layer_runs.end_waiting(model)


def _warning(plugin: LowPrecision, fqns: Sequence[str]) -> str:
    last = sorted({fqn.rpartition(".")[2] for fqn in fqns})
    gathered = ""
    if plugin.modules.sharded is not None:
        gathered = (
            " FSDP2 gathers the weights like those of the other converted layers: where these are float8, such a"
            " product reads rounded weights."
        )
    return (
        f"`precision={plugin.precision!r}`: converted layers were {NOT_CALLED}: {_first(fqns, 4)}. The module around a"
        " layer reads the weight itself, as `F.linear(x, self.qkv.weight)` does, so the product does not run in"
        f" {plugin.format}. The plan counts these layers as kept from now on.{gathered} `keep={last!r}` keeps layers of"
        f" these names from the start; to run them in {plugin.format}, call the layers: `self.qkv(x)`."
    )
