"""The weights of a live model in a server's format, one tensor after the other, for a server that runs already."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_lowprec.precision.plain import unwrapped
from lightning_lowprec.private.deepspeed import refuse_zero
from lightning_lowprec.private.transformers import is_model
from lightning_lowprec.serving.adapters import WithoutAdapter, config_of
from lightning_lowprec.serving.choice import NOTHING
from lightning_lowprec.serving.content import Content
from lightning_lowprec.serving.export import DTYPES, DtypeName, choice_of, served_model
from lightning_lowprec.serving.formats.registry import FormatName, find
from lightning_lowprec.serving.source import LiveModel


def fp8_state(
    model: nn.Module,
    *,
    format: FormatName = "compressed-tensors",
    dtype: DtypeName = "bf16",
    merge_adapters: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator of the names and tensors that :func:`lightning_lowprec.export` would write.

    One tensor is made at a time, on the device of the model, so there is no second copy of the model. Of a sharded
    model, each tensor is gathered when its turn comes: all ranks iterate to the end, and every rank gets whole tensors.
    Do not change the weights while you iterate. The device is not waited for, so NaN and inf are handed on.

    Args:
        model: as for ``export``; a module without a model of transformers keeps its own names.
        format: as for ``export``.
        dtype: as for ``export``.
        merge_adapters: add a LoRA adapter to the weights; else the adapter is left out.

    Raises:
        ValueError: an option is not valid, or no layer is converted.
        RuntimeError: ZeRO-3 has cut the weights.
    """
    refuse_zero(model, "`fp8_state(model)`")
    inner = served_model(model) if any(map(is_model, model.modules())) else unwrapped(model)
    layout = find(format)
    if dtype not in DTYPES:
        raise ValueError(f"`dtype={dtype!r}` is not valid; expected one of: {', '.join(DTYPES)}.")
    choice = NOTHING if layout.scale_per is None else choice_of(inner)
    source = WithoutAdapter(LiveModel(inner), config_of(inner), merge=merge_adapters)
    content = Content(source=source, model=inner, choice=choice, format=layout, dtype=DTYPES[dtype])
    return _tensors(content)


@torch.no_grad()
def _tensors(content: Content) -> Iterator[tuple[str, Tensor]]:
    shapes = {stored.name: stored.shape for stored in content.stored()}
    parts: dict[str, list[Tensor]] = {}
    elements: dict[str, int] = {}
    for name, part in content.chunks():
        parts.setdefault(name, []).append(part)
        elements[name] = elements.get(name, 0) + part.numel()
        if elements[name] == torch.Size(shapes[name]).numel():
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # knows no float8
                whole = torch.cat(parts.pop(name))
            yield name, whole.reshape(shapes[name])
