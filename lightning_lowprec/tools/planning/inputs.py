"""The batch and the loss with which a model on the meta device makes a step: of the data, or of the model itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lowprec.private.either import LightningModule
from lightning_lowprec.private.torch import tensors_of, tree_map_only
from lightning_lowprec.private.transformers import is_model


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The batch and the loss of a model."""

    words: str
    batch: Callable[[int, int | None, torch.device], Any]
    """Returns a batch without values: of so many rows, of so many tokens each."""
    loss: Callable[[nn.Module, Any], Tensor]
    reads_sequences: bool = False
    """Whether the length of a sequence is asked for."""


def inputs_of(model: nn.Module, data: Any = None) -> Inputs:
    """Return the batch and the loss that fit a model; ``data``: a batch of the user's, on CPU, rows first."""
    if data is not None:
        loss = _training_step if isinstance(model, LightningModule) else _mean_of_output
        return Inputs(words="a batch of the data", batch=partial(_rows_like, data), loss=loss)
    mean = "the mean of the output as loss"
    example = getattr(model, "example_input_array", None)
    if example is not None:
        words = f"`example_input_array`; {mean}"
        return Inputs(words=words, batch=partial(_rows_like, example), loss=_mean_of_output)
    of_transformers: Any = model if is_model(model) else None
    first = next((module for module in model.modules() if list(module.parameters(recurse=False))), None)
    if getattr(of_transformers, "main_input_name", "") != "input_ids" and not isinstance(first, nn.Embedding):
        raise ValueError(
            f"nothing tells what {type(model).__name__} reads. Name a LightningDataModule with `--data my.Data`, or"
            " give the model an `example_input_array`."
        )
    if of_transformers is None or of_transformers.get_output_embeddings() is None:
        return Inputs(words=f"token ids; {mean}", batch=_tokens, loss=_mean_of_output, reads_sequences=True)
    words = "token ids; the model's own loss"
    return Inputs(words=words, batch=_tokens, loss=_loss_of_language_model, reads_sequences=True)


def _tokens(size: int, sequence: Any, device: torch.device) -> Tensor:
    return torch.zeros(size, sequence, dtype=torch.long, device=device)


def _rows_like(example: Any, size: int, sequence: int | None, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda t: torch.zeros(size, *t.shape[1:], dtype=t.dtype, device=device), example)


def _loss_of_language_model(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def _training_step(model: Any, batch: Any) -> Tensor:
    output = model.training_step(batch, 0)
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _mean_of_output(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    tensors = [t for t in tensors_of(output) if t.requires_grad]
    if not tensors:
        raise ValueError("the model returned nothing that has a gradient, so there is no step to simulate.")
    return tensors[0].mean()
