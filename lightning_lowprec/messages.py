"""Every log line and every warning of this package, on rank 0.

Log lines go through ``logging.getLogger("lightning_lowprec")``, warnings have the class :class:`LowPrecisionWarning`:
both can be silenced without those of Lightning and torch.
"""

import warnings
from typing import final

from lightning_lowprec_autoload import info, is_rank_zero

__all__ = ["LowPrecisionWarning", "info", "warn"]


@final
class LowPrecisionWarning(UserWarning):
    """The class of every warning of this package."""


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Warn on rank 0; ``stacklevel=1`` shows the line that calls this function, 2 the line that called that one."""
    if is_rank_zero():
        warnings.warn(message, LowPrecisionWarning, stacklevel=stacklevel + 1)
