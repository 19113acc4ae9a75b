"""What cannot be sharded, said before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def check_model(model: nn.Module) -> None:
    """Raise TypeError if ``model`` is wrapped by FSDP1, or sharded already."""
    for fqn, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(
                f"{fqn or type(model).__name__!r} is wrapped by `FullyShardedDataParallel` (FSDP1), which does not mix"
                " with FSDP2. Leave the wrapping to the strategy (`wrap=` says what is gathered as one)."
            )
    sharded = [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)]
    sharded = sharded or [fqn for fqn, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise TypeError(
            f"{type(model).__name__} is sharded already ({sharded[0] or 'the model itself'!r}), so it can no longer be"
            " converted. Leave sharding to the strategy, or keep `ModelParallelStrategy` and call"
            " `lightning_lowprec.parallelize(model, mesh, plugin)` where you shard."
        )


def check_shared(model: nn.Module, wrapped: Mapping[str, nn.Module]) -> None:
    """Raise ValueError if a wrapped module shares a parameter with a module outside of it: FSDP2 would untie them."""
    names: dict[int, list[str]] = {}
    for fqn, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(fqn)
    for fqns in names.values():
        groups = {max((g for g in wrapped if fqn.startswith(f"{g}.")), key=len, default="") for fqn in fqns}
        if len(groups) > 1:
            raise ValueError(
                f"{' and '.join(fqns)} are one parameter, but would be gathered with different modules"
                f" ({' and '.join(repr(g or 'the root') for g in sorted(groups))}), which unties them. Choose `wrap` so"
                " that both lie in one."
            )
