"""Entry points of installed packages, read once: Lightning reads them for each Trainer and each Fabric, in 6 ms."""

import functools
import sys
from importlib import metadata

_read = metadata.entry_points


@functools.cache
def _of(path: tuple[str, ...], group: str) -> metadata.EntryPoints:
    return _read(group=group)


def entry_points(**params: str) -> metadata.EntryPoints:
    """Return what ``importlib.metadata.entry_points`` does; a group is looked up once per ``sys.path``."""
    return _of(tuple(sys.path), params["group"]) if params.keys() == {"group"} else _read(**params)


def read_once() -> None:
    """Let Lightning, of either package, look there."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        if name in sys.modules:
            sys.modules[name].entry_points = entry_points
