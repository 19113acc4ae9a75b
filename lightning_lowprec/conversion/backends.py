"""The registry of backends: each entry answers every question that the rest of the package has about a backend.

    backends.register(Backend(name="mine", names={"fp8-mine": PrecisionName(plugin_class=Mine, summary="...")}, ...))

The other parts of the package ask this registry, and keep no lists of classes. :mod:`lightning_lowprec.names`
registers the three backends of this package by the same call. An entry imports no torch, so that ``lowprec`` knows all
names at once: a plugin may be given as ``"module:Class"``, and functions import what they need when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning_lowprec.conversion.name_formats import NO_GROUPED_PRODUCT, Formats
from lightning_lowprec.conversion.recipe_map import RecipeMap
from lightning_lowprec.runs_where import RecipeKey

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from lightning_lowprec.numerics.casts import LayerNumerics
    from lightning_lowprec.numerics.weight_rounding import WeightRounding


def imported(path: str) -> Any:
    """Return what ``"module:name"`` names, below this package if the path begins with a dot."""
    return resolve_name(f"lightning_lowprec{path}" if path.startswith(".") else path)


def later(path: str) -> Callable[..., Any]:
    """Return a function that imports another one, ``"module:function"``, when it is called, and calls it."""
    return lambda *args: imported(path)(*args)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a precision asks of a plan, beside the user's choices of layers."""

    recipe: str | RecipeMap = "tensorwise"
    """The recipe whose break-even points and gains are used, or recipes per layer."""
    alignment: int = 16
    """The features of a converted Linear are multiples of this number."""
    converted_class: type[nn.Module] | None = None
    """The class that an earlier plan gave to Linears; such a layer gets the row of a Linear."""
    stores_codes: bool = False
    """Weights become parameters of codes, so a weight that a hook computes at each forward is kept."""
    frozen_codes: bool = False
    """Whether the precision has ``frozen="codes"``."""
    conv1d: bool = True
    """Whether ``Conv1D`` of transformers (GPT-2) can convert, whose weight is [in, out]."""
    pads: bool | None = None
    """Whether features that are no multiples of ``alignment`` are padded; False: by the option ``pad_inner_dim`` of the
    plugin; None: never."""
    experts: str | None = NO_GROUPED_PRODUCT
    """Why stacked experts stay in high precision; None: they convert."""
    base: str = "bf16"
    """The dtype of everything that does not convert."""
    head: str = "bf16"
    """The option ``head`` of the precision."""
    format: str = "FP8"
    """The format of the weights that convert, in words."""


@dataclass(frozen=True, kw_only=True)
class PrecisionName:
    """One name that a user may write after ``precision=``."""

    plugin_class: type[object] | str
    """The class of the precision plugin, derived from ``precision.base.LowPrecision``, or ``"module:Class"``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the plugin's constructor."""
    plan: PlanRequest = PlanRequest(conv1d=False)
    """What plans under this name ask for, which need no plugin: its class takes a second and Lightning to import."""
    summary: str
    """One line for ``lowprec doctor`` and the docs, without the dtype of the operations outside of FP8."""
    fp16: bool = False
    """Whether ``NAME-fp16`` exists too, with ``base="fp16"``: fp16 with loss scaling outside of FP8."""
    masters: bool = False
    """Whether ``NAME`` exists with the endings of ``gone.ENDINGS`` too: bf16 weights, ``master_weights=``."""
    lacks: Mapping[str, str] = field(default_factory=dict)
    """For each suffix that this name does not have, the reason or the remedy, for error messages."""
    gathers_fp8: bool = False
    """Whether FSDP2 gathers converted weights as codes (``formats.fsdp2``); the plugin's ``gathers`` says why."""
    tile: int = 0
    """Rows and columns of what has a scale of its own in a gathered weight; 0: the weight has one scale."""
    layer_recipes: tuple[str, ...] = ()
    """The recipes that a layer may have under this name; (): all of its backend's (``Backend.recipes``)."""
    formats: Formats | None = None
    """What the products read, what is kept, and what is sent; None: nobody has said it."""
    weight_rounding: Callable[[], WeightRounding | None] = lambda: None
    """Returns how the forward rounds weights; None: the scales are neither per weight nor per row or 128 x 128."""
    backend: str | None = None
    """The name of the backend, which ``names.TABLE`` fills in; None: half precision, which converts no layers."""
    hardware_recipe: RecipeKey | None = None
    """The row of the table of what runs where, :mod:`lightning_lowprec.runs_where`; None: the table has none."""

    @property
    def plugin(self) -> type[Any]:
        """The class of the precision plugin."""
        plugin: type[object] = imported(self.plugin_class) if isinstance(self.plugin_class, str) else self.plugin_class
        return plugin

    @property
    def keeps_codes(self) -> bool:
        """Whether weights are kept as codes with a scale, as MS-AMP's are."""
        return self.formats is not None and self.formats.keeps_codes

    def plan_request(self, recipe: str | RecipeMap | None = None) -> PlanRequest:
        """Return what a plan under this name asks for; ``recipe``: recipes per layer, None: the name's own."""
        base, recipe = self.options.get("base", "bf16"), recipe or self.plan.recipe
        return replace(self.plan, recipe=recipe, stores_codes=self.keeps_codes, base=base)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to compute in low precision: its names, its layers, and its functions for other parts of the package.

    These are called for every model, so they import no heavy library before they have found a layer of the backend.
    """

    name: str
    """The backend's name in checkpoints."""
    title: str
    """The backend's name in messages: ``"Transformer Engine"``."""
    names: Mapping[str, PrecisionName]
    """Names for ``precision=``."""
    recipes: Mapping[str, bool] = field(default_factory=dict)
    """The recipes that a layer may have where layers have recipes of their own, and for each whether FSDP2 gathers the
    weight as codes; the first is the plugin's default."""
    module: str | None = None
    """The module to import before the backend can run; None: the backend needs no other package."""
    distribution: str | None = None
    """The distribution that holds ``module``, as the package index spells it."""
    layers_from: tuple[str, ...]
    """Prefixes of ``__module__`` of the layer classes, such as ``("transformer_engine.", "lightning_lowprec.te.")``."""
    revert: Callable[[nn.Module], None] = lambda model: None
    """Give a model torch's own layers back, in place; parameters stay the same objects. Called for a model that has a
    layer of this backend."""
    revert_optimizer: Callable[[Optimizer], None] = lambda optimizer: None
    """Make an optimizer plain again, in place, if the backend has given its weights back. Called for an optimizer whose
    class comes from ``layers_from`` too."""
    changed_optimizers: Callable[[], Iterable[Optimizer]] = tuple
    """Return the optimizers that the backend has changed and that still exist."""
    coded_weight: Callable[[nn.Module], str | None] = lambda model: None
    """Return the fqn of a weight that this backend keeps as codes instead of values, or None."""
    keeps_master: Callable[[Tensor], bool] = lambda param: False
    """Return whether the backend keeps a master of this parameter, so that checkpoints leave the master to it."""
    shard_codes: Callable[[nn.Module, int, object], Callable[[DeviceMesh], None]] | None = None
    """Called before ``fully_shard`` with a model that keeps codes, the number of shards and the ``ShardOptions``.
    Checks the arguments, prepares the weights, and returns a function to call with the mesh after ``fully_shard``."""
    notes_runs: bool = False
    """Whether its layers call ``layer_runs.note_run`` in their forward: a warning names those that are never called."""
    cuts: Callable[[nn.Module], bool] = lambda layer: True
    """Return whether tensor parallelism can cut a layer, that is, whether it computes with DTensors."""
    checkpoint: Callable[[], Callable[..., object]] | None = None
    """Returns the function that recomputes activations of blocks with this backend's layers; None: torch's own."""
    numerics: Callable[[nn.Module], LayerNumerics | str | None] = lambda layer: "its backend does not say how it rounds"
    """Return how a layer rounds its tensors in the present forward, or why that is not known; None for a module that
    multiplies nothing. See :class:`~lightning_lowprec.callbacks.NumericsMonitor`."""
    weight_roundings: Callable[[nn.Module], Mapping[str, WeightRounding | None]] = lambda layer: {}
    """Return how the forward of a layer rounds its weights, by the names of its Parameters; see ``PrecisionName``."""

    def owns(self, layer: nn.Module | Optimizer) -> bool:
        """Return whether a layer or optimizer is one of this backend, even if FSDP2 or the user derived its class."""
        return any(cls.__module__.startswith(self.layers_from) for cls in type(layer).__mro__)


left_roundings: WeakKeyDictionary[nn.Module, Mapping[str, WeightRounding | None]] = WeakKeyDictionary()
"""For each layer that is plain again: how its forward rounded the weights in the Trainer's last run."""
_registered: dict[str, Backend] = {}
_listeners: list[Callable[[], None]] = []


def register(backend: Backend) -> None:
    """Make a backend and its precision names known.

    Raises:
        ValueError: a backend of this name, or one of its precision names, is registered already.
    """
    if backend.name in _registered:
        raise ValueError(f"`name={backend.name!r}` is a registered backend already; call `unregister` first.")
    taken = {name: other.name for other in _registered.values() for name in other.names}
    for name in backend.names.keys() & taken.keys():
        raise ValueError(
            f"`names` has {name!r}, which the backend {taken[name]!r} has registered; choose another name."
        )
    _registered[backend.name] = backend
    for listener in _listeners:
        listener()


def unregister(name: str) -> None:
    """Forget a backend and its precision names."""
    del _registered[get(name).name]
    for listener in _listeners:
        listener()


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` after every later ``register`` and ``unregister``."""
    _listeners.append(listener)


def registered() -> tuple[Backend, ...]:
    """Return all backends, in the order of their registration."""
    return tuple(_registered.values())


def get(name: str | None) -> Backend:
    """Return the backend of this name."""
    if name is None or name not in _registered:
        raise ValueError(f"`backend={name!r}` is not registered; expected one of: {', '.join(_registered)}.")
    return _registered[name]


def owner(module: nn.Module) -> Backend | None:
    """Return the backend whose layer ``module`` is, or None for any other module."""
    return next((backend for backend in _registered.values() if backend.owns(module)), None)


def weight_roundings(layer: nn.Module) -> Mapping[str, WeightRounding | None] | None:
    """Return how the forward of a layer rounds its weights, or did in the Trainer's last run; None: not converted."""
    backend = owner(layer)
    return left_roundings.get(layer) if backend is None else backend.weight_roundings(layer)


def revert_all(model: nn.Module, *, except_for: str | None = None) -> None:
    """Give a model torch's own layers back, in place, but leave the layers of the backend ``except_for``."""
    from lightning_lowprec.conversion import experts, head, module_dtypes

    head.restore_heads(model)
    experts.stop_following_autocast(model)
    module_dtypes.release(model)
    one_of_each = {type(module): module for module in model.modules()}.values()
    for backend in registered():
        if backend.name != except_for and any(map(backend.owns, one_of_each)):
            backend.revert(model)


def revert_optimizer(optimizer: Optimizer, *, except_for: str | None = None) -> None:
    """Make an optimizer plain again after :func:`revert_all`, in place, also its state."""
    for backend in registered():
        if backend.name != except_for and backend.owns(optimizer):
            backend.revert_optimizer(optimizer)


def changed_optimizers() -> list[Optimizer]:
    """Return the optimizers that backends have changed and that still exist."""
    return [optimizer for backend in registered() for optimizer in backend.changed_optimizers()]


def keeps_master(param: Tensor) -> bool:
    """Whether a backend keeps a master of ``param`` by itself, beside those that an optimizer keeps."""
    return any(backend.keeps_master(param) for backend in registered())
