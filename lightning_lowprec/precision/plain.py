"""Give a model back as it was before a precision set it up, and warn of what is left where another precision runs it.

    before set-up    fit, test ...                     after the run of a Trainer, or plain(model)
    nn.Linear   ->   FP8Linear, bf16 weight, master -> nn.Linear, the master's value in the same Parameter

Lightning's own precisions do not look at the layers of a model, so FP8 layers stay FP8 there.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from torch import Tensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.head import LossHead
from lightning_lowprec.conversion.layer_runs import remove_hooks
from lightning_lowprec.masters.copies import unwatch
from lightning_lowprec.masters.float32_values import is_marked, kept
from lightning_lowprec.masters.registry import existing_masters, optimizers_with_masters
from lightning_lowprec.masters.weights import Float32Weights, unmark
from lightning_lowprec.messages import info, warn
from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.parameters import WeakList, parameters_of
from lightning_lowprec.numerics.rounding import upper_half
from lightning_lowprec.numerics.weight_rounding import WeightRounding
from lightning_lowprec.precision.host import trainer_of
from lightning_lowprec.private.deepspeed import refuse_zero
from lightning_lowprec.private.either import Trainer, is_wrapped
from lightning_lowprec.private.lightning import is_tuning
from lightning_lowprec.private.torch_modules import undo_compile, without_compiled_wrapper
from lightning_lowprec.private.transformers import with_own_cache

if TYPE_CHECKING:
    from lightning_lowprec.precision.base import LowPrecision

_GATHER: Final = (
    "Build the model anew and load the whole state dict, which is plain under every precision: on all ranks `state ="
    " get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, of"
    " torch.distributed.checkpoint.state_dict; then on rank 0 `fresh.load_state_dict(state)`"
)


def plain(model: Module, *, copy: bool = False) -> Module:
    """Give ``model`` torch's own layers and plain weights back, from whatever precision it was trained in.

    The modules, Parameters, gradients, hooks, ties, frozen flags and train or eval mode stay. Weights that a precision
    has made half precision become float32 with the values of their masters, if their optimizer still exists, else with
    their rounded values. Weights that are kept as codes become float32. Weights that were half precision before the
    precision came, and did not train, stay. Optimizers that hold these weights go on as plain optimizers.

    Blocks that a plugin compiled are not compiled any more; what the user compiled stays, and is compiled again at the
    next call.

    Args:
        model: a module, LightningModule or ``transformers`` model; wrapped by Fabric, DDP or ``torch.compile`` too.
        copy: leave ``model`` as it is, to train on, and return a plain deep copy.

    Returns:
        The module without wrappers, or its copy. A wrapper of DDP is of no use after a change in place.

    Raises:
        TypeError: ``model`` is no module.
        RuntimeError: the model is sharded (FSDP, FSDP2, ZeRO, tensor parallel), or is a part of what an optimizer with
            masters or codes trains; the message says what to do.
    """
    if not isinstance(model, Module):
        raise TypeError(f"`model` is a {type(model).__name__}; expected a torch.nn.Module.")
    module = unwrapped(model)
    _refuse_sharded(module)
    changed = {id(o): o for o in (*backends.changed_optimizers(), *optimizers_with_masters())}
    ids = {id(p) for p in module.parameters()}
    optimizers = [o for o in changed.values() if any(id(p) in ids for p in parameters_of(o))]
    if copy:
        module, optimizers = deepcopy(module), []  # the weights of the copy are float32
    _refuse_part(module, optimizers)
    _make_plain([module], optimizers)
    return module


def _make_plain(
    modules: list[Module], optimizers: Iterable[Optimizer], before: Iterable[tuple[Tensor, Tensor]] = ()
) -> None:
    """Give modules their own layers and float32 weights back, and optimizers their class and state, in place.

    ``before``: tensors of the modules, and the data that they get back instead.
    """
    weights = Float32Weights()
    for module in modules:
        masters = existing_masters(module.parameters())
        forget(module)
        backends.revert_all(module)
        for part in module.modules():
            undo_compile(part)
            with_own_cache(part)
        weights.undo_cast(module, masters)
    for tensor, data in before:
        tensor.grad = None
        tensor.data = data.to(tensor.device)
    for optimizer in optimizers:
        backends.revert_optimizer(optimizer)
        weights.follow(optimizer)
    for module in modules:
        unwatch(module)
        for parameter in module.parameters():
            unmark(parameter)


def unwrapped(model: Module) -> Module:
    """Return the user's module inside of wrappers of Fabric, DDP and ``torch.compile``."""
    inner: Any = without_compiled_wrapper(model)
    if is_wrapped(inner) or isinstance(inner, DistributedDataParallel):
        inner = inner.module
    return model if inner is model else unwrapped(inner)


def _refuse_sharded(module: Module) -> None:
    refuse_zero(module, "`plain(model)`", masters=True)
    sharded = [fqn for fqn, p in module.named_parameters() if isinstance(p, DTensor)]
    wrappers = (FSDPModule, FullyShardedDataParallel)
    if sharded or any(isinstance(part, wrappers) for part in module.modules()):
        which = f"{len(sharded)} parameters of {type(module).__name__} are sharded" if sharded else "FSDP has the model"
        raise RuntimeError(f"`plain(model)` needs whole weights, and {which}. {_GATHER}.")


def _refuse_part(module: Module, optimizers: list[Optimizer]) -> None:
    """Raise if an optimizer has masters or codes of other parameters too: it cannot be plain for a part of them."""
    inside = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        others = [p for p in parameters_of(optimizer) if id(p) not in inside]
        others = [p for p in others if (is_marked(p) and p.dtype in HALF_DTYPES) or backends.keeps_master(p)]
        if others:
            raise RuntimeError(
                f"`plain(model)` got a {type(module).__name__}, and {type(optimizer).__name__} trains it together with"
                f" {len(others)} parameters outside of it that are half precision or codes. Call `plain` with the whole"
                " model that the optimizer trains, or make a plain copy of the part: `plain(part, copy=True)`."
            )


# ---- what is left in a model that another precision runs

REMEDY: Final = (
    "Give the model torch's layers and float32 weights back before, by `lightning_lowprec.plain(model)`; or load its"
    " state dict, which is plain, into a fresh model; or use a precision of lightning_lowprec, which sets the model up"
    " anew"
)


def warn_of_layers(model: Module, run: str) -> None:
    """Warn of the layers that a backend has left in ``model``; ``run``: ``"under `precision='32-true'`"``."""
    layers = [
        m for m in model.modules() if backends.owner(m) is not None or (isinstance(m, LossHead) and m.kind == "fp8")
    ]
    titles = {"`head='fp8'`" if (owner := backends.owner(layer)) is None else owner.title for layer in layers}
    if layers:
        warn(
            f"{len(layers)} layers of {type(model).__name__} are those of {' and '.join(sorted(titles))}, from an"
            f" earlier set-up. They still compute in low precision, and here the model runs {run}. {REMEDY}."
        )


def warn_of_half_weights(model: Module, run: str) -> None:
    """Warn of trainable weights that masters have left in half precision: here they would train without masters."""
    half = [p for p in model.parameters() if p.requires_grad and p.dtype in HALF_DTYPES and is_marked(p)]
    if half:
        warn(
            f"{len(half)} parameters of {type(model).__name__} are {half[0].dtype} since an earlier run with master"
            f" weights. The model runs {run}, where they train without masters and lose small updates. Make them"
            " float32 before, by `lightning_lowprec.plain(model)`; or use a precision of lightning_lowprec. Both take"
            " the exact values of the masters while their optimizer exists."
        )


def forget(model: Module) -> None:
    """Remove the notes that an earlier run has left."""
    remove_hooks(model)
    for module in model.modules():
        backends.left_roundings.pop(module, None)


# ---- after a run of the Trainer


@final
class AfterFit:
    """The modules, tensors and optimizers of one run of the Trainer, to undo what the precision has done to them.

    The checkpoint from which the Tuner restores weights after a search holds rounded values. So a search keeps the
    tensors from before the set-up, on the CPU.
    """

    def __init__(self) -> None:
        self.optimizers: Iterable[Optimizer] = ()
        """Those of this run; the ones with masters stay alive until others take over the values."""
        self._modules: WeakList[Module] = WeakList()
        self._before: list[tuple[Tensor, Tensor]] = []
        self._tunes = False

    def begin(self, plugin: "LowPrecision", module: Module, trainer: Trainer | None) -> None:
        """Note that ``plugin`` will set ``module`` up, if a Trainer runs ``module``."""
        if trainer is None:
            return
        self._modules.add(module)
        self._tunes = is_tuning(trainer)
        if _sharded_by(plugin) is None and self._tunes:
            self._before += [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]

    def keep_changed(self) -> None:
        """Forget the tensors whose dtype and class the set-up has left alone."""
        self._before = [
            (t, data.cpu()) for t, data in self._before if (t.dtype, type(t.data)) != (data.dtype, type(data))
        ]

    def end(self, plugin: "LowPrecision") -> None:
        """Hand the modules back, and by ``plain_after_fit`` or after a search make them and their optimizers plain.

        The layers note how they rounded weights, for :func:`lightning_lowprec.export`. A model that the strategy leaves
        sharded stays as it is.
        """
        modules, self._modules = list(self._modules), WeakList()
        before, self._before = self._before, []
        running = [optimizer for module in modules for optimizer in getattr(trainer_of(module), "optimizers", ())]
        optimizers, self.optimizers = [*self.optimizers, *running], ()
        if (where := _sharded_by(plugin)) is not None:
            if plugin._in_trainer and plugin._will_train:
                info(
                    f"{plugin.precision}: the model keeps its low-precision layers and weights after `fit`, because"
                    f" {where} has sharded it. To call it outside of the Trainer, load a checkpoint into a fresh model."
                )
            return
        for module in modules:
            remove_hooks(module)
        if not plugin.plain_after_fit and not self._tunes:
            for module in modules if not plugin._will_train else ():  # an evaluation leaves no rounded weights
                Float32Weights().undo_cast(module, kept(module.parameters()), all_cast=False)
            return
        ties_away = plugin.masters is not None and plugin.masters.config.form.startswith("remainder")
        if plugin._will_train or plugin.backend is not None:
            roundings = [_roundings(module, ties_away=ties_away) for module in modules]
        else:  # those of a fit before this run stay
            left = backends.left_roundings
            roundings = [{fqn: left[m] for fqn, m in module.named_modules() if m in left} for module in modules]
        _make_plain(modules, optimizers, before if self._tunes else ())
        for module, by_fqn in zip(modules, roundings, strict=True):
            layers = dict(module.named_modules())
            backends.left_roundings.update((layers[fqn], by_name) for fqn, by_name in by_fqn.items() if fqn in layers)

    def __reduce__(self) -> "tuple[type[AfterFit], tuple[()]]":
        return type(self), ()  # tensors and optimizers stay in their process


def _sharded_by(plugin: "LowPrecision") -> str | None:
    """Return the strategy that leaves the model of ``plugin`` sharded; None: the model stays whole."""
    if plugin.engine is not None:
        return str(plugin.engine.name)
    return None if plugin.modules.sharded is None else "FSDP2"


def _roundings(module: Module, *, ties_away: bool) -> dict[str, Mapping[str, WeightRounding | None]]:
    """Return how the forward of each converted layer rounds its weights to FP8, by the layer's fqn."""
    return {
        fqn: {name: _of_master(getattr(layer, name), rounding, ties_away) for name, rounding in by_name.items()}
        for fqn, layer in module.named_modules()
        if (by_name := backends.weight_roundings(layer)) is not None
    }


def _of_master(weight: Tensor, rounding: WeightRounding | None, ties_away: bool) -> WeightRounding | None:
    """Return a rounding of the float32 value that a half-precision weight will have."""
    if rounding is None or weight.dtype not in HALF_DTYPES or not is_marked(weight):
        return rounding
    to_half = upper_half if ties_away else partial(Tensor.to, dtype=weight.dtype)
    return replace(rounding, as_trained=to_half)
