"""Evaluate, during training, in the precision that will serve: the loss of the exported model, before the export."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_lowprec.conversion.options import LayerOptions, Names, shows
from lightning_lowprec.private.either import Callback, LightningModule, Trainer
from lightning_lowprec.serving.formats import FormatName, find_format
from lightning_lowprec.serving.served_layers import ServedLayers


@final
@shows()
class LowPrecisionEval(Callback):
    """Evaluate as a server of an exported model would: weights in FP8, and activations too.

    In a Trainer, ``callbacks=[LowPrecisionEval("compressed-tensors")]``: validation and test run in the precision of
    the server, and log the names that they always log. In Fabric, ``with evaluation.on(model): ...``.

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
        keep: for a model that does not train in FP8: linear layers that stay in high precision, beside output heads,
            routers and LoRA adapters. A run in FP8 has chosen its layers.
        only: for a model that does not train in FP8: if given, only these layers become codes.

    Raises:
        ValueError: an argument is not valid; at the evaluation, no weight would become codes, or the Trainer has a
            second one of these callbacks.
    """

    def __init__(
        self,
        format: FormatName = "compressed-tensors",
        *,
        weights_only: bool = False,
        keep: Names = (),
        only: Names | None = None,
    ) -> None:
        known = find_format(format)
        if known.scale_per is None:
            raise ValueError(
                f"`format={format!r}` is not valid here: it has no codes, so the server computes as the run does. Use"
                " 'compressed-tensors', 'torchao' or 'hf-fp8-block'."
            )
        if weights_only:
            known.config((), True)  # raises if servers of the format round more
        self.format, self.weights_only = format, weights_only  # the object of a format cannot be pickled
        self._options = None if only is None and not keep else LayerOptions(keep=keep, only=only)
        self._open = ExitStack()
        self._said = False

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Evaluate ``model``, what ``fabric.setup`` returned or any module, as the server, without gradients.

        Afterwards every module is in the mode of before. Do not change weights within. Of a model that FSDP2 shards,
        all ranks enter this; a model that is sharded otherwise raises RuntimeError.
        """
        modes = {module: module.training for module in model.modules()}
        layers = self._served(model)
        try:
            model.eval()
            with torch.no_grad(), layers.swapped():
                yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _served(self, model: nn.Module) -> ServedLayers:
        format = find_format(self.format)
        layers = ServedLayers(model, format, weights_only=self.weights_only, options=self._options)
        if not self._said:
            self._said = True
            what = "weights" if self.weights_only else "weights and activations"
            rank_zero_info(
                f"LowPrecisionEval: evaluates as a server of {self.format!r}, emulated: {what} of"
                f" {len(layers.coded)} layers in FP8, {len(layers.content.kept)} linear layers in high precision."
            )
        return layers

    # ---- Trainer

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if sum(type(callback) is type(self) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ValueError("A Trainer takes one `LowPrecisionEval`: both would log the same names. Leave one out.")
        self._end()
        self._open.enter_context(self._served(pl_module).swapped())

    on_test_start = on_validation_start

    def _end(self, *args: Any, **kwargs: Any) -> None:
        self._open.close()

    on_validation_end = on_test_end = on_exception = teardown = _end
