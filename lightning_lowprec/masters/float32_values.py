"""Keep the float32 value of a parameter that a precision has made half precision or codes, until somebody needs it.

    arrives by                            waits                                taken by
    set-up                       -->  an attribute of the Parameter,  -->  a master, when an optimizer holds the weight
    load_state_dict                   in host memory if it does not        a float32 weight: after a run, or if no
                                      train                                optimizer comes; a state dict

A weight that has a master takes at once what is loaded (:func:`~lightning_lowprec.masters.copies.arrive`). A kept
value counts where it rounds to its parameter: what the program has written to the parameter since then is newer.
"""

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from lightning_lowprec.numerics.formats import HALF_DTYPES
from lightning_lowprec.numerics.rounding import reconcile
from lightning_lowprec.private.torch import local_tensor, with_local_tensor

KEPT: Final = "lowprec_float32"  # an attribute of Parameters; a map by weak references would keep torch from swapping
MARK: Final = "lowprec_dtype"
"""Another one: the dtype that a plugin gave the parameter."""
NO_PLAIN_STEP: Final = "lowprec_no_plain_step"  # an attribute of weights that only optimizers with masters may step


def keep(parameter: Tensor, value: Tensor, *, on_host: bool) -> None:
    """Keep a value of any floating dtype; of a DTensor the shard."""
    shard = local_tensor(value.detach())
    vars(parameter)[KEPT] = shard.cpu() if on_host else shard


def raw(parameter: Tensor) -> Tensor | None:
    """Return the tensor that :func:`keep` has kept, or None."""
    value: Tensor | None = vars(parameter).get(KEPT)
    return value


def drop(parameter: Tensor) -> None:
    """Free the kept value."""
    vars(parameter).pop(KEPT, None)


@torch.no_grad()
def kept(parameters: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return the float32 values of half-precision ``parameters`` by ``id(parameter)``, where one is kept."""
    found = {}
    for p in parameters:
        if (value := raw(p)) is not None and p.dtype in HALF_DTYPES:
            shard = local_tensor(p.detach())
            found[id(p)] = with_local_tensor(reconcile(value.to(shard.device).float(), shard), p)
    return found


def mark(parameter: Tensor) -> None:
    """Note at ``parameter`` that a plugin gave it its dtype."""
    setattr(parameter, MARK, parameter.dtype)


def is_marked(parameter: Tensor) -> bool:
    """Return whether a plugin gave ``parameter`` the dtype that it has."""
    return getattr(parameter, MARK, None) == parameter.dtype
