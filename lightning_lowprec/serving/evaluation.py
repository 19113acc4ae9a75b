"""Evaluate, during training, in the precision that will serve: the loss of the exported model, before the export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_lowprec.checks import Count, check_types
from lightning_lowprec.conversion.options import LayerOptions, Names
from lightning_lowprec.private.either import (
    Callback,
    LightningModule,
    Trainer,
    is_param_in_hook_signature,
    isolate_rng,
)
from lightning_lowprec.private.names import replaced
from lightning_lowprec.serving.formats import Format, FormatName, find_format
from lightning_lowprec.serving.served_layers import ServedLayers


@final
class _OwnMetrics:
    """The log names and the metrics of a second run of ``validation_step`` or ``test_step``, in one evaluation loop.

    The names that ``module`` logs get a prefix, and the second run updates metrics of its own.
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
            undo.enter_context(replaced(self._module, "log", log_beside))
            yield


@final
class LowPrecisionEval(Callback):
    """Evaluate as a server of an exported model would: weights in FP8, and activations too.

    In a Trainer, ``callbacks=[LowPrecisionEval("compressed-tensors")]``: validation and test run in the precision of
    the server, and log the names that they always log. With ``prefix="served/"`` they run in both precisions:
    ``val_loss`` is that of the run, and ``served/val_loss`` that of the server.

    In Fabric, ``with evaluation.on(model): ...``.

    Codes and scales are those that :func:`lightning_lowprec.export` would write. The arithmetic is emulated on every
    device: values of codes are multiplied in the dtype of autocast (else of the input). So this evaluation is slower
    than a server and than the run. The codes take 1 byte per weight until the evaluation ends (sharded by FSDP2: 1 byte
    divided by the number of ranks); at a time the values of one layer exist. Nothing that trains changes: weights,
    random numbers, optimizers, kept codes, compiled code.

    Layers that the format keeps in high precision are multiplied in the dtype of autocast. Norms, embeddings and losses
    run as in the run's own evaluation.

    Args:
        format: ``"compressed-tensors"``, ``"torchao"`` (a scale per row of the weight, and per token) or
            ``"hf-fp8-block"`` (per 128 x 128 of the weight, and per token and 128 values).
        weights_only: round weights only.
        prefix: evaluate in both precisions. ``validation_step`` and ``test_step`` then run twice per batch, with the
            same random numbers; they must change nothing but what they log and their metrics of torchmetrics, of which
            the second run has copies. What ``on_validation_epoch_end`` logs is of the run alone.
        every: with ``prefix``: run the second evaluation in every so many validations, from the first one on.
        keep: for a model that does not train in FP8: linear layers that stay in high precision, beside output heads,
            routers and LoRA adapters. A run in FP8 has chosen its layers.
        only: for a model that does not train in FP8: if given, only these layers become codes.

    Raises:
        ValueError: an argument is not valid; at the evaluation, no weight would become codes.
    """

    def __init__(
        self,
        format: FormatName = "compressed-tensors",
        *,
        weights_only: bool = False,
        prefix: str | None = None,
        every: int = 1,
        keep: Names = (),
        only: Names | None = None,
    ) -> None:
        check_types({"weights_only": weights_only, "every": every}, {"weights_only": bool, "every": Count})
        self._name = format  # a format has functions that cannot be pickled
        if self._format.scale_per is None:
            raise ValueError(
                f"`format={format!r}` is not valid here: it has no codes, so the server computes as the run does. Use"
                " 'compressed-tensors', 'torchao' or 'hf-fp8-block'."
            )
        if weights_only:
            self._format.config((), True)  # raises if servers of the format round more
        if prefix is not None and (not isinstance(prefix, str) or not prefix):
            raise ValueError(f"`prefix={prefix!r}` is not valid; expected None, or text such as 'served/'.")
        if prefix is None and every != 1:
            raise ValueError(
                f"`every={every}` needs `prefix='served/'`: without a prefix one name would be logged in two"
                " precisions."
            )
        self.prefix, self.every, self.weights_only = prefix, every, weights_only
        self._options = None if only is None and not keep else LayerOptions(keep=keep, only=only)
        self._validations = 0
        self._layers: ServedLayers | None = None
        self._metrics: _OwnMetrics | None = None
        self._open = ExitStack()
        self._said = False

    @property
    def _format(self) -> Format:
        return find_format(self._name)

    # ---- Fabric

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Evaluate ``model``, what ``fabric.setup`` returned or any module, as the server, without gradients.

        Afterwards every module is in the mode of before, also after an exception. Do not change weights within. Of a
        model that FSDP2 shards, all ranks enter this; a model that is sharded otherwise raises RuntimeError.
        """
        modes = {module: module.training for module in model.modules()}
        layers = self._serve(model)
        try:
            model.eval()
            with torch.no_grad(), layers.swapped():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _serve(self, model: nn.Module) -> ServedLayers:
        layers = ServedLayers(model, self._format, weights_only=self.weights_only, options=self._options)
        if not self._said:
            self._said = True
            what = "weights" if self.weights_only else "weights and activations"
            rank_zero_info(
                f"LowPrecisionEval: evaluates as a server of {self._format.name!r}, emulated: {what} of"
                f" {len(layers.coded)} layers in FP8, {len(layers.content.kept)} linear layers in high precision."
            )
        return layers

    # ---- Trainer

    @property
    @override
    def state_key(self) -> str:
        """A key of its own for every format, so that one run may have several of these callbacks."""
        return f"LowPrecisionEval[{self._format.name},{self.weights_only},{self.prefix}]"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations = state_dict["validations"]

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        due = self._validations % self.every == 0
        self._validations += not trainer.sanity_checking
        if due:
            self._begin(pl_module)

    @override
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin(pl_module)

    def _begin(self, module: LightningModule) -> None:
        self._end()
        self._layers = self._serve(module)
        if self.prefix is None:
            self._open.enter_context(self._layers.swapped())
        else:
            self._metrics = _OwnMetrics(module, self.prefix)

    def _end(self) -> None:
        self._layers, self._metrics = None, None
        self._open.close()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    on_test_end = on_validation_end

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """With ``prefix``, run a step in the precision of the server, before that of the run."""
        if self._layers is None or self._metrics is None:
            return
        name, loaders = ("test_step" if trainer.testing else "validation_step"), trainer.num_val_batches
        if trainer.testing or trainer.sanity_checking:
            loaders = trainer.num_test_batches if trainer.testing else trainer.num_sanity_val_batches
        step: Any = getattr(pl_module, name)
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise ValueError(
                "`LowPrecisionEval(prefix=...)` runs every batch twice, and a step with `dataloader_iter` reads its"
                " batches itself. Leave `prefix` out, which evaluates in the precision of the server alone."
            )
        index = [batch_idx] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []  # as the Trainer does
        with isolate_rng(), self._layers.swapped(), self._metrics.in_place():
            getattr(trainer.strategy, name)(batch, *index, *[dataloader_idx] * (len(loaders) > 1))

    on_test_batch_start = on_validation_batch_start
