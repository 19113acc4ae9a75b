"""How torch's modules keep their hooks and compiled calls; `torch.py` has the list of these names.

And what inductor is told: options of compiled blocks, and what avoids a fault of Triton from torch 2.14 on.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, TypeVar, final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user compiled ``module`` itself, by ``torch.compile`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


_compiled_here: WeakKeyDictionary[nn.Module, ref[object]] = WeakKeyDictionary()
"""Modules that :func:`compile_in_place` has compiled, and their compiled calls; a call holds its module."""


def compile_in_place(
    module: nn.Module, options: Mapping[str, object], *, unless: Callable[[Iterable[object]], bool] | None = None
) -> None:
    """Compile ``module`` as ``module.compile()`` does, so that :func:`undo_compile` can undo it.

    A call for whose arguments ``unless`` is True runs uncompiled.

    The compiler begins at no function of torch itself, and so takes only pieces of torch's own classes, such as
    ``nn.Sequential`` and ``nn.TransformerEncoderLayer``. For them it begins here.
    """
    written_in: str | None = getattr(getattr(type(module), "forward", None), "__module__", None)
    if written_in is not None and written_in.startswith("torch."):
        vars(module)["_call_impl"] = MethodType(_call_of_torch, module)
    module.compile(**options)
    vars(module).pop("_call_impl", None)
    compiled: Any = module._compiled_call_impl
    if compiled is None:  # somebody has switched `Module.compile` off
        return

    def call(*args: object, **kwargs: object) -> object:
        assert unless is not None
        return (module._call_impl if unless((*args, *kwargs.values())) else compiled)(*args, **kwargs)

    if unless is not None:
        module._compiled_call_impl = call
    _compiled_here[module] = ref(module._compiled_call_impl)


def _call_of_torch(module: nn.Module, *args: object, **kwargs: object) -> object:
    return nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]


def undo_compile(module: nn.Module) -> None:
    """Undo :func:`compile_in_place`; what the user has compiled stays compiled."""
    call = _compiled_here.pop(module, None)
    if call is not None and call() is module._compiled_call_impl:
        module._compiled_call_impl = None


def without_compiled_wrapper(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` was called with, or ``model`` itself."""
    module: nn.Module = getattr(model, "_orig_mod", model)
    return module


def remove_forward_hook(module: nn.Module, function: Callable[..., object]) -> None:
    """Remove every forward hook of ``module`` that is ``function``."""
    for key in [key for key, hook in module._forward_hooks.items() if hook is function]:
        del module._forward_hooks[key]


def is_batch_or_instance_norm(module: nn.Module) -> bool:
    """Return whether ``module`` is a batch or instance norm, which refuses float32 beside half-precision weights."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor that has a gradient and of which ``tensor`` is a view, or ``tensor`` itself.

    A write in place to a view gives the view another place in the graph, where its hooks do not run.
    """
    base = tensor._base
    return tensor if base is None or not base.requires_grad else base


class TracedModule(nn.Module):
    """A module that learns when ``torch.jit.trace`` calls it; any other call costs nothing."""

    def check_trace(self) -> None:
        """Raise if the module cannot be traced."""

    def _slow_forward(self, *args: object, **kwargs: object) -> Any:
        self.check_trace()
        return super()._slow_forward(*args, **kwargs)  # type: ignore[no-untyped-call]


R = TypeVar("R")
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten._scaled_mm}
_VIEWS = {torch.ops.aten.view, torch.ops.aten.reshape, torch.ops.aten._unsafe_view}
_FAULTY_FROM = (2, 14)
"""The first version of torch whose code has the instructions."""


@functools.cache
def block_options() -> dict[str, object]:
    """Return the arguments of ``torch.compile`` for blocks with converted layers, as far as this torch knows them.

    Values of up to 60 operations, not 30, are computed again where they are read, instead of written and read. GB per
    block of the 8B-shaped stack (`make ledger`): rowwise 13.8 -> 12.3, rowwise-gw-hp 11.2 -> 10.6, int8 11.9 -> 11.3,
    MS-AMP 11.7 -> 10.8; tensorwise, 128-blocks and MXFP8 as they were. Sums of a residual are written
    (:func:`_saves_sums`).
    """
    from torch._inductor import list_options

    chosen = {
        "realize_opcount_threshold": 60,
        "joint_custom_post_pass": _saves_sums(),
        "static_launch_user_defined_triton_kernels": True,  # of `numerics/kernels.py`, as inductor launches its own
    }
    return {"options": {name: value for name, value in chosen.items() if name in list_options()}}


def _saves_sums() -> object:
    """Return a pass of inductor over the graph of forward and backward: sums of a residual live until the backward.

    ``x + layer(...)`` is read by the next norm and its casts, by the next residual, and in the backward. Left alone,
    inductor keeps ``x`` and the layer's output, and adds again in each kernel. The sum takes as many bytes as the
    output, which is no longer kept. It is rounded to its dtype, as eager code does.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    @final
    class SavesSums(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            for node in graph.nodes:
                if _is_residual(node):
                    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> object:
            return get_hash_for_files((__file__,))

    return SavesSums()


def _is_residual(node: Node) -> bool:
    """Return whether a node of the forward adds the output of a product to another tensor of its shape and dtype."""
    if node.target is not torch.ops.aten.add.Tensor or node.meta.get("partitioner_tag") == "is_backward":
        return False
    terms = [term for term in node.args if isinstance(term, Node) and _kind(term) == _kind(node)]
    return len(node.users) > 1 and len(terms) == 2 and any(_is_of_product(term) for term in terms)


def _is_of_product(node: Node) -> bool:
    """Return whether a node is the output of a matrix product, in another shape, or with a bias."""
    while isinstance(target := node.target, torch._ops.OpOverload):
        if target.namespace in ("lightning_lowprec", "torchao") or target.overloadpacket in _PRODUCTS:
            return True
        is_biased = target is torch.ops.aten.add.Tensor and _kind(node.args[1])[0] != _kind(node)[0]
        if not (is_biased or target.overloadpacket in _VIEWS):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False


def _kind(node: Any) -> tuple[object, object]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return getattr(value, "shape", None), getattr(value, "dtype", None)


def compiled(function: Callable[..., R], **options: Any) -> Callable[..., R]:
    """Return ``torch.compile(function, **options)``, with kernels that store float8 as they should."""
    store_float8_right()
    kernel: Callable[..., R] = torch.compile(function, **options)
    return kernel


def store_float8_right() -> None:
    """Let inductor write minima and maxima without the instructions ``min.NaN`` and ``max.NaN``.

    Beside them Triton stores float8 values of a transposed tensor wrongly, in about a quarter of runs
    (github.com/triton-lang/triton/issues/11111). The values are the same: NaN wins over a number. torchao does the same
    in ``convert_to_float8_training``, which only its own layers go through. Code that is compiled already stays.
    """
    version: Any = torch.__version__  # compares with tuples
    if version < _FAULTY_FROM or not torch.cuda.is_available():
        return
    from torch._inductor.codegen import triton

    overrides: Any = getattr(triton, "TritonOverrides", None)
    if not (hasattr(overrides, "minimum") and hasattr(overrides, "maximum")):
        raise ImportError(
            f"torch {torch.__version__} has moved `TritonOverrides`, so compiled kernels may store wrong float8 values."
            " Install a torch that this version of lightning_lowprec supports."
        )
    overrides.minimum = staticmethod(lambda a, b: f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})")
    overrides.maximum = staticmethod(lambda a, b: f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})")
