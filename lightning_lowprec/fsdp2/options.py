"""How a model is sharded: every choice a user has, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Modules = Sequence[type[nn.Module]] | set[type[nn.Module]] | Callable[[str, nn.Module], bool]
"""Classes, or a predicate of fqn and module. (Not ``Collection``, which LightningCLI knows only with jsonargparse newer
than 4.27.)"""


@dataclass(frozen=True, kw_only=True)
class ShardOptions:
    """Choices for :func:`~lightning_lowprec.fsdp2.shard.shard`; what is left alone follows the precision."""

    wrap: Literal["auto"] | Modules = "auto"
    """Which modules are gathered and freed as one: ``"auto"`` takes the repeated blocks (the children of one class of
    the outermost ``nn.ModuleList`` or ``nn.Sequential``). The root takes what is left."""
    replicate: int | Literal["nodes"] = 1
    """Copies of the sharded model (HSDP): each is sharded over ``devices / replicate / tensor_parallel_size``.
    ``"nodes"``: one copy per node, so that only gradients travel between nodes."""
    shards: int | None = None
    """Over how many ranks one copy is sharded; None: over all that there are. A number that does not fit raises."""
    tensor_parallel: Callable[[nn.Module, Any], Any] | Mapping[str, Any] | None = None
    """A function ``(model, mesh)`` that applies tensor parallelism, or a plan for ``parallelize_module``."""
    tensor_parallel_size: int = 1
    """Devices per tensor-parallel group."""
    activation_checkpointing: bool | Modules = False
    """Recompute activations in the backward pass: True for the modules of ``wrap``, or modules of its own choice."""
    compile: bool | Mapping[str, Any] = False
    """Compile the modules of ``wrap`` in place; a mapping gives ``torch.compile`` options. An FP8 precision compiles by
    its own option."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in CPU memory."""
    reshard_after_forward: bool | int | None = None
    """Free gathered weights after the forward pass; None: yes, but for the root. An int keeps parts of them, which
    FSDP2 cannot do in float8: weights are then gathered in high precision. See ``fully_shard``."""
    fp8_all_gather: Literal["auto"] | bool = "auto"
    """Gather the weights of FP8 layers as float8; ``"auto"``: where the recipe allows it."""
    param_dtype: torch.dtype | None = None
    """What weights are gathered as and computed in; None: as the precision computes."""
    reduce_dtype: torch.dtype | None = None
    """What gradients are reduced in; None: float32."""
    sync_module_states: bool = False
    """Send the weights and buffers of rank 0 to all ranks before they are sharded. False: each rank shards what it has,
    so the ranks must build the same model (from one seed, or from one checkpoint)."""
    buffer_dtype: torch.dtype | None = None
    """What floating-point buffers are cast to; None leaves them."""
    output_dtype: torch.dtype | None = None
    """What the floating-point outputs of the model are cast to; None leaves them."""

    def __post_init__(self) -> None:
        """Check every field; nothing is changed here."""
        for name, also in (("replicate", "nodes"), ("tensor_parallel_size", 1), ("shards", None)):
            value = getattr(self, name)
            if value != also and (not isinstance(value, int) or value < 1):
                allowed = "" if also == 1 else f" or {also!r}"
                raise ValueError(f"`{name}={value!r}` is not valid; expected an int of at least 1{allowed}.")
        for name in ("wrap", "activation_checkpointing"):
            _check_modules(name, getattr(self, name), ("auto",) if name == "wrap" else (True, False))
        if not isinstance(self.compile, (bool, Mapping)):
            raise ValueError(
                f"`compile={self.compile!r}` is not valid; expected True, False or a mapping of torch.compile options."
            )
        if self.fp8_all_gather not in ("auto", True, False):
            raise ValueError(f"`fp8_all_gather={self.fp8_all_gather!r}` is not valid; expected 'auto', True or False.")
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"`{name}={value!r}` is not valid; expected a floating-point torch.dtype or None.")
        if (self.tensor_parallel is None) != (self.tensor_parallel_size == 1):
            raise ValueError(
                f"`tensor_parallel_size={self.tensor_parallel_size}` with `tensor_parallel={self.tensor_parallel!r}`:"
                " tensor parallelism needs both, a size above 1 and a plan (or a function that applies one)."
            )


def _check_modules(name: str, value: object, words: tuple[object, ...]) -> None:
    is_word = any(value is word or (isinstance(word, str) and value == word) for word in words)
    is_predicate = callable(value) and not isinstance(value, type)
    classes = list(value) if isinstance(value, Collection) and not isinstance(value, str) else []
    if is_word or is_predicate or (classes and all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)):
        return
    expected = ", ".join(map(repr, words))
    raise ValueError(
        f"`{name}={value!r}` is not valid; expected {expected}, a collection of nn.Module classes, or a function"
        " (fqn, module) -> bool."
    )
