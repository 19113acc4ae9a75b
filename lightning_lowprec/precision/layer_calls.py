"""Say which converted layers a training forward did not call, and which share of its products they compute.

A model may read the weight of a converted layer itself: ``F.linear(x, self.qkv.weight)``. This product does not run in
FP8, although the layer is converted. Products of convolutions, attention and bare parameters do not run in FP8 either.
Both show in a forward alone, so the first two training forwards after a set-up are watched; later ones have no mode.

A layer counts as not called if the module around it gave its weight to a product, and the layer did not run. So a
layer that the forward does not need, or whose weight is averaged by hand, raises no alarm. Operations in compiled code
cannot be seen. There a layer counts as not called if ``forward`` of the class around it reads the weight, and no method
does anything else with the layer.

The mode (:class:`~lightning_lowprec.private.torch_products.Operations`) sees every operation, except compiled code, and
kernels that are no operations of torch (Triton, Transformer Engine). The frames of Python tell which module runs: hooks
would make compiled code compile again.
"""

import dis
import inspect
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from types import CodeType
from typing import Any, Final, final
from weakref import WeakSet

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.experts import is_stack
from lightning_lowprec.conversion.in_place import RoleModule
from lightning_lowprec.conversion.matmuls import is_linear
from lightning_lowprec.conversion.plan import NOT_CALLED
from lightning_lowprec.private.torch_modules import is_compiled
from lightning_lowprec.private.torch_products import Operations

LOW: Final = 0.1  # the share of the matrix FLOPs below which a precision of converted layers is worth a warning
_TO_PRODUCTS: Final = {f"aten.{name}" for name in ("_to_copy", "t", "transpose", "permute", "mm", "addmm", "bmm")}
"""The products that take a weight, and what happens to the weight before: autocast's cast, a transposition."""
_KINDS: Final = {"convolution": "convolutions", "rnn": "recurrent layers", "attention": "attention"}
_called: WeakSet[Module] = WeakSet()  # the converted layers that a watched forward has called
_not_called: WeakSet[Module] = WeakSet()
"""The converted layers whose weight a watched forward read without a call of the layer."""


def not_called(model: Module) -> set[str]:
    """Return the layers of a model whose weight was read without a call of the layer, by fqn."""
    return {fqn for fqn, layer in model.named_modules() if layer in _not_called}


def _converts(module: Module) -> bool:
    return backends.owner(module) is not None and (is_linear(module) or is_stack(module))


@final
class LayerCalls(Operations):
    """The layers of ``models`` that are called within this context, and the matrix FLOPs of a forward."""

    def __init__(self, models: Iterable[Module], converts: Callable[[Module], bool] = _converts) -> None:
        super().__init__()
        self.models = list(models)
        modules = [module for model in self.models for module in model.modules()]
        self.layers = {id(m): m for m in modules if converts(m)}
        self.called: set[int] = set()  # the ids of the layers that ran
        self.converted = 0  # the FLOPs of converted layers
        self.others: Counter[str] = Counter()  # the FLOPs of all other products, by kind
        self.compiled = {id(m) for m in modules if is_compiled(m)}
        """The ids of the modules that are compiled: which layers they call is not seen."""
        self._ids = set(map(id, modules))
        self._counted: set[int] = set()
        self._read: set[int] = set()
        self._inside: dict[int, list[Module]] = defaultdict(list)  # the layers that a module's code can call, by its id
        for model in self.models:
            for fqn, layer in model.named_modules():
                if id(layer) in self.layers and is_linear(layer) and not isinstance(layer, RoleModule):
                    self._inside[id(_around(model, fqn))].append(layer)

    @override
    def see(self, operation: Any, args: tuple[Any, ...], out: Any) -> None:
        name = str(operation.overloadpacket)
        formula = _FLOPS.get(name)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        sized = all(not t.is_nested and all(isinstance(size, int) for size in t.shape) for t in tensors)
        flops = formula(args, out) if formula is not None and sized else 0
        module, is_ours = self._innermost()
        if module in self.layers:
            self.called.add(module)
            self.converted += flops
            self._counted |= {module} if flops else set()
        elif flops:
            self.others[next((words for part, words in _KINDS.items() if part in name), "other products")] += flops
        if is_ours:
            return
        for layer in self._inside.get(module or 0, ()) if name in _TO_PRODUCTS else ():
            if any(arg is layer._parameters.get("weight") for arg in args):
                self._read.add(id(layer))

    def _innermost(self) -> tuple[int | None, bool]:
        """Return the id of the innermost module that runs, and whether this package computes the operation."""
        frame: Any = inspect.currentframe()
        ours, in_compiled, calls_made = False, False, False
        while frame is not None:
            where = str(frame.f_globals.get("__name__"))
            if where in _WATCHES:
                frame = frame.f_back
                continue
            ours |= where.startswith(_OURS)
            module = self._module_of(frame)
            if module is not None and (in_compiled or calls_made):
                self.compiled.add(module)
                return None, False
            if module is not None:
                return module, ours
            in_compiled |= where.startswith(_COMPILED) or frame.f_code.co_name.startswith("torch_dynamo_resume")
            calls_made = where == _DISABLED and _is_made(frame.f_locals.get("fn"))  # f_locals keeps a frame's variables
            frame = frame.f_back
        return None, ours

    def _module_of(self, frame: Any) -> int | None:
        """Return the id of the module of which the frame is a method.

        Of converted layers only calls count: they also encode weights outside of them.
        """
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self":
            return None
        key = id(frame.f_locals.get("self"))
        return key if key in self._ids and (key not in self.layers or code.co_name in _CALLS) else None

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
                parts = fqn.split(".")
                around = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts))]
                unseen = any(id(module) in self.compiled for module in around)
                if id(layer) in self._read or (unseen and _is_only_read(model, fqn)):
                    yield layer, fqn

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
            text = self.share_in_words("the first training forward", plugin.format)
            if self.share >= LOW:
                rank_zero_info(f"{plugin.precision}: {text}.")
                return
            rank_zero_warn(
                f"`precision={plugin.precision!r}`: only {text}. So little cannot make training faster. 'bf16-mixed'"
                f" runs the same model without casts to {plugin.format}; the plan says why layers are kept"
                " (`print(trainer.precision_plugin.plan)`, in Fabric `fabric.strategy.precision.plan`)."
            )


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
    methods = {key: value for base in reversed(cls.__mro__) if base is not Module for key, value in vars(base).items()}
    codes = {method: getattr(function, "__code__", None) for method, function in methods.items()}
    codes.pop("__init__", None)
    uses = {method: set(_attributes(code, name)) for method, code in codes.items() if isinstance(code, CodeType)}
    return "weight" in uses.get("forward", ()) and set().union(*uses.values()) <= {"weight", "bias"}


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


def _percent(share: float) -> str:
    return f"{share:.{1 if share >= LOW else 2}%}"


# ---- the watch


def _product(first: int) -> Callable[..., int]:
    """Return a formula for an operation whose factors are its arguments ``first`` and ``first + 1``."""
    return lambda args, out: 2 * int(out.numel() * args[first].shape[-1])


def _head(args: Any, out: Any) -> int:
    """[T, K] and [V, K]: the logits."""
    return 2 * int(args[0].numel() * args[1].shape[0])


def _attention(args: Any, out: Any) -> int:
    """[..., S, D], [..., T, D], [..., T, V]: scores and their product with the values, without a mask."""
    query, key, value = args[:3]
    return 2 * int(math.prod(query.shape[:-1]) * key.shape[-2] * (key.shape[-1] + value.shape[-1]))


def _convolution(args: Any, out: Any) -> int:
    """One product of a filter per output, of a transposed convolution per input."""
    size = (args[0] if args[6] else out).numel()
    return 2 * int(size * math.prod(args[1].shape[1:]))


def _recurrent(args: Any, out: Any) -> int:
    """[T, B, K] and the weights of one layer on CPU, or of all layers as a list on CUDA: each step, each weight."""
    steps = args[0].shape[0] * args[0].shape[1]
    weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
    return 2 * int(steps * sum(w.numel() for w in weights if w.ndim == 2))


_FLOPS: Final[dict[str, Callable[..., int]]] = {
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten._scaled_mm", "aten._int_mm"), _product(0)),
    **dict.fromkeys(("aten._grouped_mm", "aten._scaled_grouped_mm", "transformers.grouped_mm_fallback"), _product(0)),
    **dict.fromkeys(("aten.addmm", "aten.addmm_", "aten.baddbmm", "aten.baddbmm_"), _product(1)),
    "aten.convolution": _convolution,
    "aten.mkldnn_rnn_layer": _recurrent,
    "aten._cudnn_rnn": _recurrent,
    **{
        f"aten._scaled_dot_product_{name}": _attention
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    "torch_nn._linear_cross_entropy_batch_chunked": _head,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction": _head,
    "lightning_lowprec.accumulate": _product(0),
    "lightning_lowprec.grouped_product": _product(0),
}
"""The products, with formulas of their FLOPs."""


_OURS: Final = __name__.partition(".")[0] + "."
_WATCHES: Final = (__name__, Operations.__module__)
_DISABLED: Final = "torch._dynamo.eval_frame"
_CALLS: Final = ("forward", "_call_impl")
_COMPILED: Final = ("torch._inductor.", "torch._functorch.", "torch.fx.")
"""Modules whose frames lie between an operation of compiled code and the module that was compiled."""


def _is_made(function: Any) -> bool:
    """Return whether the compiler made a function that it skips; it also skips others, such as Lightning's ``log``."""
    module = str(getattr(function, "__module__", None))
    return module not in sys.modules or module.startswith("torch.")


def watched(plugin: Any, autocast: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return ``autocast`` with a watch over a training forward; ``autocast`` alone if nothing trains or converts."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code cannot be watched
        return autocast
    return _watch(plugin, autocast)


@contextmanager
def _watch(plugin: Any, autocast: AbstractContextManager[Any]) -> Iterator[None]:
    plugin.modules.watched_forwards -= 1
    with autocast, LayerCalls(plugin.modules.prepared) as calls:
        yield
    calls.report(plugin)
