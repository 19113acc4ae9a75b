"""Callbacks for Trainer and Fabric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightning_lowprec.gone import missing_attribute

if TYPE_CHECKING:
    from lightning_lowprec.callbacks.monitor import NumericsMonitor
    from lightning_lowprec.callbacks.readings import Reading

_FROM: Final = {
    "NumericsMonitor": "monitor",
    "Reading": "readings",
}

__all__ = ["NumericsMonitor", "Reading"]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise missing_attribute(__name__, name)
    value = getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
    if name == "NumericsMonitor":  # a reading is no callback, and needs no Lightning
        from lightning_lowprec.private.either import share_bases

        share_bases()
    return value
