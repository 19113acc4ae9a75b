"""A fourth backend, as somebody outside of the package would write it: a folder and `backends.register(BACKEND)`."""

from lightning_lowprec.conversion.backends import Backend, PrecisionName
from tests.toy_backend.linear import revert
from tests.toy_backend.plugin import Toy

BACKEND = Backend(
    name="toy",
    title="Toy",
    names={"fp8-toy": PrecisionName(plugin_class=Toy, summary="weights and inputs rounded to e4m3", gathers_fp8=True)},
    layers_from=("tests.toy_backend.",),
    revert=revert,
)
