"""Float8 codes of a shard, which one all-gather leaves for the next."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class KeptCodes:
    """The codes of a shard under one scale, 1 byte per element.

    Args:
        codes: (...) float8, encoded just now on the current stream.
        scale: () float32; every write to the shard is followed by another scale.
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes = codes
        self._scale = scale
        self._stream = _stream(codes)

    def are_of(self, scale: Tensor) -> bool:
        """Return whether the codes can be sent for a shard with ``scale``, on the current stream.

        Another stream, such as that of `module.unshard()`, would have to wait for the stream that encoded, and the
        allocator would have to know both. So each stream sends codes that it has encoded.
        """
        return scale is self._scale and self._stream == _stream(self.codes)


def _stream(codes: Tensor) -> torch.Stream | None:
    return torch.cuda.current_stream(codes.device) if codes.is_cuda else None
