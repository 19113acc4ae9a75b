"""Keep optimizer state in 8 bits between steps: codes and exponents of blocks, see ``numerics/block_floats.py``.

The state of a parameter under the name of, for example, ``exp_avg`` is two plain tensors between steps:
``exp_avg_codes``, of the parameter's shape, and ``exp_avg_exponents``, (rows, blocks per row) uint8. They are sharded
like the parameter; blocks lie inside rows, so that codes do not depend on the number of ranks. Within a step
``exp_avg`` is float32, unless a kernel steps the parameter.

Small parameters, and those whose rows are not multiples of 32 numbers, keep float32 state.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Final, Literal, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_lowprec.masters.stores import Store
from lightning_lowprec.numerics import block_floats
from lightning_lowprec.numerics.block_floats import BlockFormat
from lightning_lowprec.numerics.flat import local
from lightning_lowprec.numerics.rounding import bits_of_positions
from lightning_lowprec.private.torch import dtensor

BlockKind = Literal["8bit", "fp8"]
CODES: Final = "_codes"
EXPONENTS: Final = "_exponents"
LEAST: Final = 4096
"""Numbers of the smallest parameter whose state is coded."""
NEVER_NEGATIVE: Final = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")
"""State of torch's optimizers that cannot be negative."""
NO_MOMENTS: Final = ("ax", "prev", "step_size")
"""State of ASGD and Rprop that is no average of gradients: averaged weights, signs and step sizes stay float32."""
SEED_STEP: Final = 1 << 32  # added to the seed per kind of state, as in `moments.py`
State = MutableMapping[str, Any]
OptimizerState = MutableMapping[Any, Any]


def format_of(kind: BlockKind, name: str) -> BlockFormat:
    """Return the format of the state that is called ``name``."""
    if name not in NEVER_NEGATIVE:
        return block_floats.E4M3
    return block_floats.E5M3 if kind == "8bit" else block_floats.E5M2


def block_of(param: Tensor) -> int:
    """Return how many numbers of ``param`` share an exponent, or 0 if its state stays float32."""
    shard = local(param)
    if param.dim() < 2 or param.numel() < LEAST or not _is_dense(shard):
        return 0
    row = _row(param)
    return block_floats.block_size(row) if row else 0


def coded(state: State) -> Iterator[str]:
    """Yield the names of the state that is coded."""
    for name in state:
        if name.endswith(CODES) and f"{name.removesuffix(CODES)}{EXPONENTS}" in state:
            yield name.removesuffix(CODES)


@torch.no_grad()
def decode(state: State, name: str, param: Tensor) -> Tensor:
    """Return the float32 values of coded state, of the shape of ``param``."""
    whole = state[f"{name}{CODES}"], state[f"{name}{EXPONENTS}"]
    block = whole[0].numel() // whole[1].numel()
    codes, exponents = map(local, whole)
    row = _row(param)
    if not row or row % block:  # on all ranks, or on none
        raise ValueError(
            f"the codes of {name!r} of a parameter of shape {tuple(param.shape)} share an exponent per {block} numbers,"
            " and the ranks of a tensor-parallel group have parts of such blocks now. Load the checkpoint with the"
            " `tensor_parallel_size` that it was saved with."
        )
    flat = block_floats.decode(_flat(codes), exponents.reshape(-1), block, block_floats.BY_DTYPE[codes.dtype])
    return _like(param, flat.as_strided(codes.shape, codes.stride()))


def zeros(state: State, name: str, param: Tensor, kind: BlockKind) -> None:
    """Set coded state of zeros."""
    shard, block = local(param), block_of(param)
    codes = torch.zeros_like(shard, dtype=torch.uint8).view(format_of(kind, name).dtype)
    exponents = torch.zeros(shard.numel() // block, dtype=torch.uint8, device=shard.device)
    _set(state, name, param, codes, exponents)


@final
class BlockMoments:
    """The coded state of the parameters of a store.

    Args:
        kind: the formats.
        store: the store of the parameters, which knows their positions.
        seed: the seed of the run.
    """

    def __init__(self, kind: BlockKind, store: Store, seed: int) -> None:
        self.kind, self._store, self._seed = kind, store, seed

    def load(self, state: OptimizerState, params: Sequence[Tensor]) -> None:
        """Make the state of ``params`` float32."""
        for entry, param in _entries(state, params):
            for name in list(coded(entry)):
                values = decode(entry, name, param)
                del entry[f"{name}{CODES}"], entry[f"{name}{EXPONENTS}"]
                entry[name] = values

    @torch.no_grad()
    def save(self, state: OptimizerState, params: Sequence[Tensor], step: int) -> None:
        """Encode the state of ``params``; ``step`` counts the calls."""
        for entry, param in _entries(state, params):
            if block := block_of(param):
                names = sorted(
                    name for name, value in entry.items() if name not in NO_MOMENTS and _is_moment(value, param)
                )
                for number, name in enumerate(names, start=1):
                    self._encode(entry, name, param, block, self._seed + number * SEED_STEP, step)

    def settle(self, state: OptimizerState, params: Sequence[Tensor], step: int) -> None:
        """Encode state that is float32, for example from a checkpoint."""
        self.save(state, params, step)

    def _encode(self, entry: State, name: str, param: Tensor, block: int, seed: int, step: int) -> None:
        values = local(entry.pop(name))
        position = self._store.position(self._index(param))
        format = format_of(self.kind, name)
        bits = bits_of_positions(values.numel(), seed, step, position, values.device)
        codes, exponents = block_floats.encode(_flat(values), bits, block, format)
        _set(entry, name, param, codes.as_strided(values.shape, values.stride()), exponents)

    def _index(self, param: Tensor) -> int:
        return next(index for index, known in enumerate(self._store.params) if known is param)


def _entries(state: OptimizerState, params: Sequence[Tensor]) -> Iterator[tuple[State, Tensor]]:
    return ((state[param], param) for param in params if param in state)


def _is_moment(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.dim() > 0 and value.shape == param.shape


def _set(state: State, name: str, param: Tensor, codes: Tensor, exponents: Tensor) -> None:
    state[f"{name}{CODES}"] = _like(param, codes)
    per_row = _row(param) // block_of(param)
    columns = param.numel() // param.shape[0] // block_of(param)
    state[f"{name}{EXPONENTS}"] = _like(param, exponents.view(codes.shape[0], per_row), columns)


def _like(param: Tensor, shard: Tensor, columns: int = 0) -> Tensor:
    """Return ``shard`` as a DTensor if ``param`` is one, of its shape or with ``columns`` numbers per row of it."""
    if not isinstance(param, DTensor):
        return shard
    shape, stride = param.shape, param.stride()
    if columns:
        shape, stride = torch.Size([param.shape[0], columns]), (columns, 1)
    return dtensor(shard, param.device_mesh, param.placements, shape, stride)


def _row(param: Tensor) -> int:
    """Return how many numbers of a row are on this rank; 0 if ranks have unequal parts of rows, or no whole parts."""
    parts = 1
    for dim, placement in enumerate(param.placements if isinstance(param, DTensor) else ()):
        if isinstance(placement, Shard) and placement.dim > 0:
            parts *= param.device_mesh.size(dim) if placement.dim == 1 else 0  # type: ignore[attr-defined]
    return 0 if not parts or (parts > 1 and param.shape[1] % parts) else param.numel() // param.shape[0] // parts


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in the order of the memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()
