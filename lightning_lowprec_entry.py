"""Answer torch and Lightning, which load the entry points of lightning_lowprec from this file.

torch loads every entry point of the group ``torch.backends`` at the end of ``import torch``, and ``import torch`` fails
where the module of one is missing. An editable install points to a folder that may move, and ``python -S`` sees the
metadata of an editable install without its modules. So this file is copied beside the metadata in an editable install
too (see ``tools/editable/lowprec_build.py``), imports the rest late, and stays as small as this: an editable install
keeps the copy of the day on which it was made.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from typing import Any


def install() -> None:
    """Let Lightning know our names; where the files of lightning_lowprec are missing, warn and do nothing else."""
    if os.environ.get("LOWPREC_AUTOLOAD") == "0":
        return
    try:
        import lightning_lowprec_autoload

        lightning_lowprec_autoload.install()
    except Exception as error:
        with suppress(Warning):  # `python -W error` would end `import torch` here
            warnings.warn(
                f"lightning_lowprec is installed, but its files are missing or broken ({error!r}), so `precision=` does"
                " not know its names. Install it again (an editable install does not follow a folder that moved), or"
                " `pip uninstall lightning-lowprec`. LOWPREC_AUTOLOAD=0 silences this warning.",
                stacklevel=2,
            )


def monitor() -> list[Any]:
    """Return the callbacks that every Trainer gets: none without the variable ``LOWPREC_MONITOR``."""
    if not os.environ.get("LOWPREC_MONITOR"):
        return []
    from lightning_lowprec_autoload import monitor

    return monitor()
