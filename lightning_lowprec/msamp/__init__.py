"""The MS-AMP backend: weights, gradients and optimizer state in 8 and 16 bits, with scales (arXiv 2310.18313)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightning_lowprec.gone import missing_attribute

if TYPE_CHECKING:
    from lightning_lowprec.msamp.adamw import ScaledAdamW
    from lightning_lowprec.msamp.linear import scale_linears
    from lightning_lowprec.msamp.weight import scale_weight_, set_values_, values_of

_FROM: Final = {
    "ScaledAdamW": "adamw",
    "scale_linears": "linear",
    "scale_weight_": "weight",
    "set_values_": "weight",
    "values_of": "weight",
}
"""The module of each public name; a module is imported when its name is asked for."""

__all__ = ["ScaledAdamW", "scale_linears", "scale_weight_", "set_values_", "values_of"]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise missing_attribute(__name__, name)
    return getattr(import_module(f"{__name__}.{_FROM[name]}"), name)
