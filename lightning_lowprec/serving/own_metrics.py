"""What a second run of ``validation_step`` logs: other names, and metrics of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, final

from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection


@final
class OwnMetrics:
    """The log names and the metrics of a second evaluation, in one evaluation loop.

    Args:
        module: logs by ``self.log`` and ``self.log_dict``.
        prefix: is put before every name.
    """

    def __init__(self, module: LightningModule, prefix: str) -> None:
        self._module, self._prefix = module, prefix
        self._copies: list[tuple[nn.Module, str, nn.Module]] = []
        """The module that holds a metric, the name there, and a copy of the metric."""
        self._names: dict[int, str] = {}
        """By id of a copied metric: the name of the metric in the module."""
        self._find("", module)

    def _find(self, path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if not isinstance(child, (Metric, MetricCollection)):
                self._find(f"{path}{name}.", child)
                continue
            copied = deepcopy(child)
            self._copies.append((module, name, copied))
            for inner, metric in copied.named_modules():
                self._names[id(metric)] = f"{path}{name}.{inner}".rstrip(".")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Log under other names, and update the copies of the metrics."""
        log = self._module.log

        def log_beside(name: str, value: Any, *args: Any, **options: Any) -> None:
            if isinstance(value, Metric):
                options.setdefault("metric_attribute", self._names.get(id(value)))
            log(self._prefix + name, value, *args, **options)

        with ExitStack() as undo:
            for holder, name, copied in self._copies:
                undo.callback(holder._modules.__setitem__, name, holder._modules[name])
                holder._modules[name] = copied
            vars(self._module)["log"] = log_beside
            undo.callback(vars(self._module).pop, "log")
            yield
