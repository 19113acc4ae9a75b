"""Say which converted layers a training forward did not call, and which share of its products they compute.

A model may read the weight of a converted layer itself: ``F.linear(x, self.qkv.weight)``. This product does not run in
FP8, although the layer is converted. Products of convolutions, attention and bare parameters do not run in FP8 either.
Both show in a forward alone, so the watch over the first training forwards looks for them.

A layer counts as not called if the module around it gave its weight to a product, and the layer did not run. So a
layer that the forward does not need, or whose weight is averaged by hand, raises no alarm. Operations in compiled code
cannot be seen. There a layer counts as not called if ``forward`` of the class around it reads the weight, and no method
does anything else with the layer.
"""

from __future__ import annotations

import dis
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import CodeType
from typing import Any, Final, final
from weakref import WeakSet

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.nn import Module

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.conversion.in_place import RoleModule
from lightning_lowprec.conversion.matmuls import is_linear
from lightning_lowprec.conversion.plan import NOT_CALLED

LOW: Final = 0.1
"""The share of the matrix FLOPs below which a precision of converted layers is worth a warning."""
_TO_PRODUCTS: Final = {f"aten.{name}" for name in ("_to_copy", "t", "transpose", "permute", "mm", "addmm", "bmm")}
"""The products that take a weight, and what happens to the weight before: autocast's cast, a transposition."""
_KINDS: Final = {"convolution": "convolutions", "rnn": "recurrent layers", "attention": "attention"}


_called: WeakSet[Module] = WeakSet()
"""The converted layers that a watched forward has called."""
_not_called: WeakSet[Module] = WeakSet()
"""The converted layers whose weight a watched forward read without a call of the layer."""


def not_called(model: Module) -> set[str]:
    """Return the layers of a model whose weight was read without a call of the layer, by fqn."""
    return {fqn for fqn, layer in model.named_modules() if layer in _not_called}


def _converts(module: Module) -> bool:
    return backends.owner(module) is not None and (is_linear(module) or is_stack(module))


@final
class LayerCalls:
    """The layers that one forward calls, and its matrix FLOPs.

    Args:
        models: the modules that may run.
        converts: tells which layers are converted.
    """

    def __init__(self, models: Sequence[Module], converts: Callable[[Module], bool] = _converts) -> None:
        self.models = models
        self.layers = {id(m): m for model in models for m in model.modules() if converts(m)}
        self.called: set[int] = set()
        """The ids of the layers that ran."""
        self.converted = 0
        """The FLOPs of converted layers."""
        self.others: Counter[str] = Counter()
        """The FLOPs of all other products, by kind."""
        self.compiled: set[int] = set()
        """The ids of the modules that are compiled: which layers they call is not seen."""
        self._counted: set[int] = set()
        self._read: set[int] = set()
        self._inside = self._layers_by_module()

    def _layers_by_module(self) -> Mapping[int, list[Module]]:
        """Return the layers that the code of a module can call, by the id of the module."""
        layers: dict[int, list[Module]] = defaultdict(list)
        for model in self.models:
            for fqn, layer in model.named_modules():
                if id(layer) in self.layers and is_linear(layer) and not isinstance(layer, RoleModule):
                    layers[id(_around(model, fqn))].append(layer)
        return layers

    def note(self, operation: str, args: Sequence[Any], flops: int, module: int | None, is_ours: bool) -> None:
        """Note an operation, the id of the module that runs it, and whether this package computes it."""
        if module in self.layers:
            self.called.add(module)
            self.converted += flops
            self._counted |= {module} if flops else set()
        elif flops:
            self.others[next((words for part, words in _KINDS.items() if part in operation), "other products")] += flops
        if is_ours:
            return
        for layer in self._inside.get(module or 0, ()) if operation in _TO_PRODUCTS else ():
            if any(arg is layer._parameters.get("weight") for arg in args):
                self._read.add(id(layer))

    @property
    def share(self) -> float | None:
        """The share of the FLOPs in converted layers; None: nothing ran, or not all products can be seen."""
        total = self.converted + self.others.total()
        seen = not self.compiled and self.called == self._counted
        return self.converted / total if seen and total else None

    def share_in_words(self, of: str, format: str) -> str:
        """Return the share in words, with the shares of other products; "" if the share is not known."""
        if (share := self.share) is None:
            return ""
        total = self.converted + self.others.total()
        rest = ", ".join(f"{kind} {_percent(flops / total)}" for kind, flops in self.others.most_common())
        text = f"{_percent(share)} of the matrix FLOPs of {of} run in {format}"
        return f"{text}; the others: {rest}" if rest else text

    def not_called(self) -> Iterator[tuple[Module, str]]:
        """Yield every converted layer whose weight is read by the module around it, and its fqn."""
        for model in self.models:
            for fqn, layer in model.named_modules():
                if id(layer) not in self.layers or id(layer) in self.called:
                    continue
                if id(layer) in self._read or (self._runs_compiled(model, fqn) and _is_only_read(model, fqn)):
                    yield layer, fqn

    def _runs_compiled(self, model: Module, fqn: str) -> bool:
        """Return whether a module around a layer is compiled."""
        parts = fqn.split(".")
        return any(id(model.get_submodule(".".join(parts[:end]))) in self.compiled for end in range(len(parts)))

    def report(self, plugin: Any) -> None:
        """Log the share, or warn of a low one, and warn of layers that were not called; each once per set-up.

        The plan of the plugin counts these layers as kept from now on.
        """
        _called.update(self.layers[key] for key in self.called)
        new = [(layer, fqn) for layer, fqn in self.not_called() if layer not in _called | _not_called]
        _not_called.update(layer for layer, _ in new)
        if new:
            rank_zero_warn(_warning(plugin, [fqn for _, fqn in new], len(self.layers)))
            if plugin.plan is not None:  # of the module that was set up last
                plugin.plan = plugin.plan.without(not_called(self.models[-1]))
        if self.share is not None and self.converted and not plugin.modules.said_share:
            plugin.modules.said_share = True
            _say_share(plugin, self, self.share)


def _around(model: Module, fqn: str) -> Module:
    """Return the innermost module around a layer that has a forward, so that its code can call the layer."""
    while fqn:
        fqn = fqn.rpartition(".")[0]
        module = model.get_submodule(fqn)
        if type(module).forward is not Module.forward:
            return module
    return model


def _is_only_read(model: Module, fqn: str) -> bool:
    """Return whether the class around a layer reads its weight in ``forward``, and no method calls or passes it."""
    parent, _, name = fqn.rpartition(".")
    cls = type(model.get_submodule(parent))
    methods = {method: code for base in reversed(cls.__mro__) for method, code in _methods(base)}
    methods.pop("__init__", None)
    uses = {method: set(_attributes(code, name)) for method, code in methods.items()}
    return "weight" in uses.get("forward", ()) and set().union(*uses.values()) <= {"weight", "bias"}


def _methods(cls: type) -> Iterator[tuple[str, CodeType]]:
    if cls is not Module:
        for name, function in vars(cls).items():
            if isinstance(code := getattr(function, "__code__", None), CodeType):
                yield name, code


def _attributes(code: CodeType, name: str) -> Iterator[str | None]:
    """Yield what is read of ``name`` where the code reads it: the name of an attribute, or None for any other use."""
    for first, second in pairwise(dis.get_instructions(code)):
        if first.argval == name and first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield second.argval if second.opname == "LOAD_ATTR" else None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes(constant, name)


def _warning(plugin: Any, fqns: list[str], layers: int) -> str:
    names = ", ".join(map(repr, fqns[:4])) + (f" and {len(fqns) - 4} more" if len(fqns) > 4 else "")
    last = sorted({fqn.rpartition(".")[2] for fqn in fqns})
    gathered = (
        " FSDP2 gathers the weights like those of the other converted layers: where these are float8, such a product"
        " reads rounded weights."
        if plugin.modules.sharded is not None
        else ""
    )
    return (
        f"`precision={plugin.precision!r}`: {len(fqns)} of {layers} converted layers were {NOT_CALLED}: {names}."
        " The module around a layer reads the weight itself, as `F.linear(x, self.qkv.weight)` does, so the product"
        f" does not run in {plugin.format}. The plan counts these layers as kept from now on.{gathered}"
        f" `keep={last!r}` keeps layers of these names from the start; to run them in {plugin.format}, call the layers:"
        " `self.qkv(x)`."
    )


def _say_share(plugin: Any, calls: LayerCalls, share: float) -> None:
    text = calls.share_in_words("the first training forward", plugin.format)
    if share >= LOW:
        rank_zero_info(f"{plugin.precision}: {text}.")
        return
    rank_zero_warn(
        f"`precision={plugin.precision!r}`: only {text}. So little cannot make training faster. 'bf16-mixed' runs the"
        f" same model without casts to {plugin.format}; the plan says why layers are kept"
        " (`print(trainer.precision_plugin.plan)`, in Fabric `fabric.strategy.precision.plan`)."
    )


def _percent(share: float) -> str:
    return f"{share:.{1 if share >= LOW else 2}%}"
