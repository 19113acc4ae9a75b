"""``hf``: the weights in high precision, as ``save_pretrained`` of transformers writes them."""

from __future__ import annotations

from typing import Final

from lightning_lowprec.serving.formats.base import Format

FORMAT: Final = Format(
    name="hf", scale_per=None, names=lambda name: (name, f"{name}_scale"), config=lambda choices: None
)
