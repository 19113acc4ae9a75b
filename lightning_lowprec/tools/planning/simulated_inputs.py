"""The batch of a simulated step, and its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, final

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_lowprec.private.fake_gpu import tensors_of
from lightning_lowprec.private.torch import tree_map_only
from lightning_lowprec.private.transformers import is_model


class Inputs(Protocol):
    """The batch and the loss of a model."""

    words: str
    """The batch and the loss, in words."""
    reads_sequences: bool
    """Whether the length of a sequence is asked for."""

    def batch(self, size: int, sequence: int | None, device: torch.device) -> Any:
        """Return a batch without values."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""


def inputs_of(model: nn.Module, data: Any = None) -> Inputs:
    """Return the batch and the loss that fit a model.

    Args:
        model: the model.
        data: a batch of the user's data, on CPU, with rows as first dimension of every tensor; None without data.

    Raises:
        ValueError: nothing tells what the model reads.
    """
    if data is not None:
        return _FromData(data)
    example = getattr(model, "example_input_array", None)
    if example is not None:
        return _FromData(example, forward=True)
    if is_model(model) and getattr(model, "main_input_name", "") == "input_ids":
        return _Tokens(labels=_has_head(model))
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    if isinstance(first, nn.Embedding):
        return _Tokens(labels=False)
    raise ValueError(
        f"nothing tells what {type(model).__name__} reads. Name a LightningDataModule with `--data my.Data`, or give"
        " the model an `example_input_array`."
    )


def _has_head(model: Any) -> bool:
    return model.get_output_embeddings() is not None


@final
class _Tokens:
    """Token ids, and the model's own loss where the model has an output head."""

    reads_sequences = True

    def __init__(self, *, labels: bool) -> None:
        self._labels = labels
        self.words = "token ids; the model's own loss" if labels else "token ids; the mean of the output as loss"

    def batch(self, size: int, sequence: int | None, device: torch.device) -> Any:
        assert sequence is not None
        return torch.zeros(size, sequence, dtype=torch.long, device=device)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self._labels:
            found: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
            return found
        return _mean(model(batch))


@final
class _FromData:
    """A batch of the user's, with other numbers of rows."""

    reads_sequences = False

    def __init__(self, example: Any, *, forward: bool = False) -> None:
        self._example, self._forward = example, forward
        self.words = "`example_input_array`; the mean of the output as loss" if forward else "a batch of the data"

    def batch(self, size: int, sequence: int | None, device: torch.device) -> Any:
        def rows(t: Tensor) -> Tensor:
            return torch.zeros(size, *t.shape[1:], dtype=t.dtype, device=device)

        return tree_map_only(Tensor, rows, self._example)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if isinstance(model, LightningModule) and not self._forward:
            found = model.training_step(batch, 0)
            found = found["loss"] if isinstance(found, Mapping) else found
            assert isinstance(found, Tensor)
            return found
        if isinstance(batch, Mapping):
            return _mean(model(**batch))
        return _mean(model(*batch) if isinstance(batch, tuple | list) else model(batch))


def _mean(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else None
    if isinstance(loss, Tensor):
        return loss
    tensors = [t for t in tensors_of(output) if t.requires_grad]
    if not tensors:
        raise ValueError("the model returned nothing that has a gradient, so there is no step to simulate.")
    return tensors[0] if tensors[0].ndim == 0 else tensors[0].mean()
