"""Options of sharding: every choice a user has, checked when it is made, and the modules that a choice means."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from torch import nn

from lightning_lowprec.checks import CompileOptions, Count, Rule
from lightning_lowprec.conversion.options import Group
from lightning_lowprec.precision.options import FloatingDtype

_CLASSES: Final = Rule("a collection of nn.Module classes", lambda classes: len(classes) > 0)
_PREDICATE: Final = Rule("a function (fqn, module) -> bool", lambda predicate: not isinstance(predicate, type))
Modules = (
    Annotated[Sequence[type[nn.Module]], _CLASSES]
    | Annotated[set[type[nn.Module]], _CLASSES]
    | Annotated[Callable[[str, nn.Module], bool], _PREDICATE]
)
"""Classes, or a predicate of fqn and module. (``Collection`` would need a jsonargparse newer than 4.27.)"""


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Group):
    """Choices for :func:`~lightning_lowprec.fsdp2.shard.shard`; by default they follow the precision.

    Args:
        wrap: the modules that are gathered and freed as one. ``"auto"`` takes the repeated blocks (the children of one
            class of the outermost ``nn.ModuleList`` or ``nn.Sequential``). The root takes what is left.
        replicate: copies of the sharded model (HSDP): each is sharded over ``devices / replicate /
            tensor_parallel_size``. ``"nodes"``: one copy per node, so that only gradients travel between nodes.
        shards: the number of ranks over which one copy is sharded; None: all that there are. A number that does not
            fit raises.
        tensor_parallel: a function ``(model, mesh)`` that applies tensor parallelism, or a plan for
            ``parallelize_module``.
        tensor_parallel_size: devices per tensor-parallel group.
        activation_checkpointing: recompute activations in the backward pass. ``True``: in the modules of ``wrap``;
            otherwise classes or a predicate, as for ``wrap``.
        compile: compile the modules of ``wrap`` in place; a mapping gives ``torch.compile`` options. An FP8 precision
            compiles by its own option.
        cpu_offload: keep shards, gradients and optimizer state in CPU memory.
        reshard_after_forward: free gathered weights after the forward pass; None: yes, but for the root. An int keeps
            parts of them, which FSDP2 cannot do with codes: weights are then gathered in high precision. See
            ``fully_shard``.
        fp8_all_gather: gather the weights of converted layers as codes; ``"auto"``: where the recipe allows it.
        param_dtype: the dtype in which weights are gathered and computed with; None: the precision's.
        reduce_dtype: the dtype in which gradients are reduced; None: float32.
        sync_module_states: send the weights and buffers of rank 0 to all ranks before they are sharded. False: each
            rank shards what it has, so the ranks must build the same model (from one seed, or from one checkpoint).
        buffer_dtype: the dtype that floating-point buffers are cast to; None: they are not cast.
        output_dtype: the dtype that floating-point outputs of the model are cast to; None: they are not cast.
    """

    wrap: Literal["auto"] | Modules = "auto"
    replicate: Count | Literal["nodes"] = 1
    shards: Count | None = None
    tensor_parallel: Callable[[nn.Module, Any], Any] | Mapping[str, Any] | None = None
    tensor_parallel_size: Count = 1
    activation_checkpointing: bool | Modules = False
    compile: bool | CompileOptions = False
    cpu_offload: bool = False
    reshard_after_forward: bool | Count | None = None
    fp8_all_gather: Literal["auto"] | bool = "auto"
    param_dtype: FloatingDtype | None = None
    reduce_dtype: FloatingDtype | None = None
    sync_module_states: bool = False
    buffer_dtype: FloatingDtype | None = None
    output_dtype: FloatingDtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tensor_parallel is None) != (self.tensor_parallel_size == 1):
            raise ValueError(
                f"`tensor_parallel_size={self.tensor_parallel_size}` with `tensor_parallel={self.tensor_parallel!r}`:"
                " tensor parallelism needs both, a size above 1 and a plan (or a function that applies one)."
            )


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return repeated blocks by fqn: the children of the outermost ModuleLists and Sequentials, if all have one class.

    A block has parameters and children.
    """
    repeated: dict[str, nn.Module] = {}
    for fqn, module in model.named_modules():
        inside = any(f"{fqn}.".startswith(f"{block}.") for block in repeated)
        if inside or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = dict(module.named_children())
        same = len(children) > 1 and len({type(child) for child in children.values()}) == 1
        if same and all(list(child.children()) and list(child.parameters()) for child in children.values()):
            repeated |= {f"{fqn}.{name}".removeprefix("."): child for name, child in children.items()}
    return repeated


def chosen(model: nn.Module, choice: Literal["auto"] | Modules, option: str) -> dict[str, nn.Module]:
    """Return the modules that ``choice`` means by fqn, without the model itself."""
    if isinstance(choice, str):
        return blocks(model)
    named = [(fqn, module) for fqn, module in model.named_modules() if fqn]
    if isinstance(choice, Collection):
        shown = str([cls.__name__ for cls in choice])
        modules = dict(pair for pair in named if isinstance(pair[1], tuple(choice)))
    else:
        shown = repr(choice)
        modules = dict(pair for pair in named if choice(*pair))
    if not modules:
        have = sorted({type(m).__name__ for m in model.modules()})
        raise ValueError(
            f"`{option}={shown}` matches no module of {type(model).__name__}; its modules are of the classes"
            f" {', '.join(have)}."
        )
    return modules
