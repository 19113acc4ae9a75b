"""Float8 codes of a shard, which one all-gather leaves for the next, in memory that is allocated once."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from lightning_lowprec.numerics.wire_format import WireFormat


@final
class KeptCodes:
    """The codes of a shard under one scale, 1 byte per element; on CUDA further codes take the same memory.

    Construct on the stream that computes, before the gathers of a forward begin. Memory of the stream that copies would
    lie between the buffers of gathers, and the allocator could not use the memory of two neighbouring buffers as one.

    The memory belongs to the stream of the construction, and other streams write and read the codes. Two rules keep
    every access in order. A stream that comes after another stream waits for all work of the other stream: so no stream
    reads unfinished codes, and no stream writes to memory that a copy, or an earlier owner of the memory, still reads.
    And the allocator knows every stream (``record_stream``): after the shard is freed, no tensor gets the memory before
    the last copy has read the codes. A gather itself needs no order, because FSDP2 copies the codes into the buffer
    that is sent, on the stream that asks for the codes.

    Args:
        values: (...) any float, the shard.
        dtype: a float8.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        with torch.inference_mode(False):  # a training step writes to memory that an evaluation has allocated
            self.codes = torch.empty(values.shape, dtype=dtype, device=values.device)
        self._scale: Tensor | None = None
        self._stream = _stream(self.codes)

    def of(self, values: Tensor, scale: Tensor, format: WireFormat) -> Tensor:
        """Return the codes, ready for the current stream: (...) any float, scalar float32 -> (...) float8.

        ``values`` are encoded if ``scale`` is not that of the last call. Every write to the shard is followed by
        another scale.
        """
        stream = _stream(self.codes)
        if stream is not None and self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            self.codes.record_stream(stream)
            self._stream = stream
        if scale is not self._scale:
            self.codes = format.encode(values, scale, out=None if stream is None else self.codes)
            self._scale = scale
        return self.codes

    def forget(self) -> None:
        """Encode at the next call of :meth:`of`, also under the same scale."""
        self._scale = None


def _stream(codes: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(codes.device) if codes.is_cuda else None
