"""Warn of converted layers that never ran: the model reads their weights itself, so their products run in bf16.

Two backward passes after a set-up are looked at; later ones cost nothing.
"""

from collections.abc import Sequence

from lightning_lowprec.conversion import layer_runs
from lightning_lowprec.conversion.plan import NOT_CALLED
from lightning_lowprec.messages import warn
from lightning_lowprec.precision.plugin import Plugin


def look(plugin: Plugin) -> None:
    """Look after one of the first backward passes, and warn of layers whose weight was read without a call."""
    modules = plugin.modules
    modules.watched_backwards -= 1
    for model in modules.prepared:
        found = layer_runs.read_without_call(model)
        for layer in found.values():
            layer_runs.note_read(layer)
        if found:
            warn(_warning(plugin, list(found)))
            if plugin.plan is not None:  # of the module that was set up last
                plugin.plan = plugin.plan.without(layer_runs.not_called(list(modules.prepared)[-1]))
        if found or not modules.watched_backwards:
            layer_runs.end_waiting(model)


def _warning(plugin: Plugin, fqns: Sequence[str]) -> str:
    names = ", ".join(map(repr, fqns[:4])) + (f" and {len(fqns) - 4} more" if len(fqns) > 4 else "")
    last = sorted({fqn.rpartition(".")[2] for fqn in fqns})
    gathered = (
        " FSDP2 gathers the weights like those of the other converted layers: where these are float8, such a product"
        " reads rounded weights."
        if plugin.modules.sharded is not None
        else ""
    )
    return (
        f"`precision={plugin.precision!r}`: converted layers were {NOT_CALLED}: {names}. The module around a"
        " layer reads the weight itself, as `F.linear(x, self.qkv.weight)` does, so the product does not run in"
        f" {plugin.format}. The plan counts these layers as kept from now on.{gathered} `keep={last!r}` keeps layers of"
        f" these names from the start; to run them in {plugin.format}, call the layers: `self.qkv(x)`."
    )
