"""Let compiled modules keep between forward and backward what they keep on a GPU, without compiling kernels.

A compiler keeps less for the backward than eager code: torch's partitioner decides which values are kept and which are
computed again. Here the partitioner decides as it does for the compiler; the two graphs then run on fake tensors. A
value that only element-wise operations write and read has no memory: a compiler makes one kernel of such operations.
Equal modules share graphs: a graph takes parameters as inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_OWN: Final = "lightning_lowprec."
Place = tuple[dict[str, Any], str]
Pause = Callable[[], AbstractContextManager[Any]]


@contextmanager
def compiling_on_fakes(pause: Pause) -> Iterator[None]:
    """Let ``torch.compile`` and ``module.compile()`` make graphs of modules for fake tensors within the context.

    Args:
        pause: a context in which a graph is made; what is allocated there does not count.
    """
    graphs: dict[Any, Any] = {}
    own: Any = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        module = getattr(model, "__self__", model)
        if not isinstance(module, nn.Module):
            return model  # a function of a few operations: nothing is kept for a backward
        return _Graphs(module, model, graphs, pause)

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = own


@final
class _Graphs:
    """The compiled call of a module."""

    def __init__(self, module: nn.Module, call: Callable[..., Any], known: dict[Any, Any], pause: Pause) -> None:
        self._module, self._call, self._known, self._pause = module, call, known, pause

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pytree: Any = torch.utils._pytree
        flat, form = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        rest = [None if isinstance(value, Tensor) else value for value in flat]
        places = list(_places(self._module))
        held = [where[name] for where, name in places]
        key = self._key(held, tensors, [value for value in rest if isinstance(value, int | float | str)])
        if key in self._known:
            return self._known[key](held, tensors)

        def pure(parameters: list[Tensor], inputs: list[Tensor]) -> Any:
            left = iter(inputs)
            values = [
                next(left) if isinstance(value, Tensor) else other for value, other in zip(flat, rest, strict=True)
            ]
            own_args, own_kwargs = pytree.tree_unflatten(values, form)
            with _in_place_of(places, parameters):
                return self._call(*own_args, **own_kwargs)

        self._known[key] = _traced(pure, self._pause)
        return self._known[key](held, tensors)

    def _key(self, *parts: Any) -> Any:
        shapes = [[(p.shape, p.dtype, p.requires_grad) if isinstance(p, Tensor) else p for p in part] for part in parts]
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), self._module.training
        return type(self._module), repr(shapes), modes


def _traced(function: Callable[..., Any], pause: Pause) -> Callable[..., Any]:
    """Return a function that makes the graphs at its first call.

    A checkpoint within the module, which a compiler also resolves, becomes one around the graphs.
    """
    aot: Any = importlib.import_module("torch._functorch.aot_autograd")
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    decompositions: Any = importlib.import_module("torch._inductor.decomposition")
    made: Any = None
    checkpointed = False

    def compiler(graph: Any, example: Any) -> Any:
        return lambda *values: _Fusing(graph, pause).run(*values)  # it keeps the values of its last run

    def run(parameters: list[Tensor], inputs: list[Tensor]) -> Any:
        nonlocal made, checkpointed
        if made is None:
            made = aot.aot_function(
                function,
                fw_compiler=compiler,
                bw_compiler=compiler,
                partition_fn=partitioners.min_cut_rematerialization_partition,
                decompositions=decompositions.select_decomp_table(),
            )
            with pause(), _as_compiling() as checkpoints:
                made(parameters, inputs)
            checkpointed = bool(checkpoints)
        return checkpoint(made, parameters, inputs, use_reentrant=False) if checkpointed else made(parameters, inputs)

    return run


@contextmanager
def _as_compiling() -> Iterator[list[bool]]:
    """Let code see a compiler, and no checkpoint; return a list with an entry per checkpoint."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    found: list[bool] = []

    def without(*args: Any, **kwargs: Any) -> Iterator[None]:
        found.append(True)
        yield

    own = torch.compiler.is_compiling, module._checkpoint_without_reentrant_generator
    torch.compiler.is_compiling, module._checkpoint_without_reentrant_generator = lambda: True, without
    try:
        yield found
    finally:
        torch.compiler.is_compiling, module._checkpoint_without_reentrant_generator = own


@final
class _Fusing(torch.fx.Interpreter):
    """Run a graph, and count no value that a kernel of several operations never writes to memory."""

    def __init__(self, graph: Any, pause: Pause) -> None:
        super().__init__(graph)
        self._pause = pause

    def run_node(self, n: Any) -> Any:
        """Run an operation."""
        if not (_is_elementwise(n) and all(map(_is_elementwise, n.users))):
            return super().run_node(n)
        with self._pause():
            return super().run_node(n)


def _is_elementwise(node: Any) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _places(module: nn.Module) -> Iterator[Place]:
    """Yield where a module keeps tensors: parameters, buffers, and what the layers of this package keep beside them."""
    seen: set[int] = set()
    for child in module.modules():
        kept = _of_own_objects(vars(child))
        deeper = [found for values in kept for found in _of_own_objects(values)]
        holders: list[Any] = [child._parameters, child._buffers, *kept, *deeper]
        for where in holders:
            for name, value in where.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield where, name


def _of_own_objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attributes of those values that are objects of this package."""
    own = [value for value in values.values() if type(value).__module__.startswith(_OWN)]
    return [vars(value) for value in own if hasattr(value, "__dict__") and not isinstance(value, nn.Module)]


@contextmanager
def _in_place_of(places: Sequence[Place], values: Sequence[Tensor]) -> Iterator[None]:
    """Let a module compute with other tensors; its own forward and hooks stay."""
    own = [where[name] for where, name in places]
    for (where, name), value in zip(places, values, strict=True):
        where[name] = value
    try:
        yield
    finally:
        for (where, name), value in zip(places, own, strict=True):
            where[name] = value
