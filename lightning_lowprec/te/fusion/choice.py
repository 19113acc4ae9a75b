"""The option ``fuse=`` of :class:`~lightning_lowprec.te.plugin.FP8TE`."""

from typing import Annotated, Literal

from lightning_lowprec.checks import Rule

Fuse = Annotated[
    Literal["auto", False],
    Rule(
        "'auto' or False. A te.TransformerLayer is written into the model by hand, and runs in FP8 under FP8TE;"
        " docs/which-backend.md compares the two"
    ),
]
"""What ``fuse=`` takes."""
