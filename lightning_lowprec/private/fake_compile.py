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
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.private.names import replaced

_OURS: Final = "lightning_lowprec."
_pytree: Any = torch.utils._pytree
Place = tuple[dict[str, Any], str]
Pause = Callable[[], AbstractContextManager[Any]]


@contextmanager
def compiling_on_fakes(pause: Pause) -> Iterator[None]:
    """Let ``torch.compile`` and ``module.compile()`` make graphs of modules for fake tensors within the context.

    What is allocated within ``pause``, while a graph is made, does not count.
    """
    graphs: dict[Any, _Graphs] = {}

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        module = getattr(model, "__self__", model)
        if not isinstance(module, nn.Module):
            return model  # a function of a few operations: nothing is kept for a backward
        return partial(_call, module, model, graphs, pause)

    with replaced(torch, "compile", compile):
        yield


def _call(
    module: nn.Module, function: Callable[..., Any], graphs: dict[Any, _Graphs], pause: Pause, *args: Any, **kwargs: Any
) -> Any:
    """Call ``function`` of a module by the graphs of the first module that was like it, and called like it."""
    flat, form = _pytree.tree_flatten((args, kwargs))
    inputs = [value for value in flat if isinstance(value, Tensor)]
    places = list(_places(module))
    weights = [where[name] for where, name in places]

    def pure(weights: list[Tensor], inputs: list[Tensor]) -> Any:
        left = iter(inputs)
        values = [next(left) if isinstance(value, Tensor) else value for value in flat]
        own_args, own_kwargs = _pytree.tree_unflatten(values, form)
        with _in_place_of(places, weights):
            return function(*own_args, **own_kwargs)

    shapes = [(t.shape, t.dtype, t.requires_grad) for t in (*weights, *inputs)]
    others = [value for value in flat if isinstance(value, int | float | str)]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"), module.training
    key = type(module), repr(shapes), repr(others), modes
    if key not in graphs:
        graphs[key] = _Graphs(pure, weights, inputs, pause)
    return graphs[key](weights, inputs)


@final
class _Graphs:
    """The forward and the backward of a function as a compiler cuts them.

    A checkpoint within the function, which a compiler also resolves, becomes one around the graphs.
    """

    def __init__(self, function: Callable[..., Any], weights: Any, inputs: Any, pause: Pause) -> None:
        def compiler(graph: Any, example: Any) -> Any:
            return lambda *values: _Fusing(graph, pause).run(*values)  # it keeps the values of its last run

        self._graphs: Any = importlib.import_module("torch._functorch.aot_autograd").aot_function(
            function,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=importlib.import_module("torch._functorch.partitioners").min_cut_rematerialization_partition,
            decompositions=importlib.import_module("torch._inductor.decomposition").select_decomp_table(),
        )
        with pause(), _as_compiling() as checkpoints:
            self._graphs(weights, inputs)
        self._checkpointed = bool(checkpoints)

    def __call__(self, weights: list[Tensor], inputs: list[Tensor]) -> Any:
        if self._checkpointed:
            return checkpoint(self._graphs, weights, inputs, use_reentrant=False)
        return self._graphs(weights, inputs)


@contextmanager
def _as_compiling() -> Iterator[list[bool]]:
    """Let code see a compiler, and no checkpoint; return a list with an entry per checkpoint."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    checkpoints: list[bool] = []

    def without(*args: Any, **kwargs: Any) -> Iterator[None]:
        checkpoints.append(True)
        yield

    with (
        replaced(torch.compiler, "is_compiling", lambda: True),
        replaced(module, "_checkpoint_without_reentrant_generator", without),
    ):
        yield checkpoints


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
        ours = _of_own_objects(vars(child))
        deeper = [values for attributes in ours for values in _of_own_objects(attributes)]
        dicts: list[Any] = [child._parameters, child._buffers, *ours, *deeper]
        for where in dicts:
            for name, value in where.items():
                if isinstance(value, Tensor) and id(value) not in seen:
                    seen.add(id(value))
                    yield where, name


def _of_own_objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the attributes of those values that are objects of this package."""
    ours = [value for value in values.values() if type(value).__module__.startswith(_OURS)]
    return [vars(value) for value in ours if hasattr(value, "__dict__") and not isinstance(value, nn.Module)]


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
