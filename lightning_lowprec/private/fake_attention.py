"""Attention on the simulated GPU: CUDA's choice without cuDNN, which keeps what flash keeps."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

FLASH_BACKWARD: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_OWN: Final[Any] = torch.nn.functional.scaled_dot_product_attention
_HALF: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
_ALIGNED: Final = 8  # elements: head dimensions are padded to multiples


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention as ``scaled_dot_product_attention`` does: (B, H, T, K) and alike -> (B, H, T, V)."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    widths = {t.shape[-1] for t in (query, key, value)}
    arguments = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    plain = query.dim() == 4 and query.dtype in _HALF and attn_mask is None
    if plain and len(widths) == 1 and query.shape[-1] <= _LARGEST_HEAD:
        return _flash(query, key, value, arguments)
    refused = (attn_mask is not None and attn_mask.requires_grad) or query.shape[1] != key.shape[1]
    if query.dim() == 4 and query.dtype in (*_HALF, torch.float32) and not refused:
        return _efficient(query, key, value, attn_mask, arguments)
    found: Tensor = _OWN(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **arguments)
    return found


def _flash(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
    width = query.shape[-1]
    more = -width % _ALIGNED
    if more:
        query, key, value = (torch.nn.functional.pad(t, (0, more)) for t in (query, key, value))
        arguments = {**arguments, "scale": arguments["scale"] or width**-0.5}
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **arguments)[0]
    return out[..., :width] if more else out


def _efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(mask, 0)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    train = any(t.requires_grad for t in (query, key, value))
    made = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, train, **arguments)
    out: Tensor = made[0]
    return out
