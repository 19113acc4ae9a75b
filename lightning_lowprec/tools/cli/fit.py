"""``lowprec fit``: stock LightningCLI, after the names of this package are registered."""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import lightning_lowprec  # noqa: F401  # registers the names


def run(argv: list[str]) -> int:
    """Fit any LightningModule and LightningDataModule by class path (``--model``, ``--data``, ``--config``)."""
    LightningCLI(args=["fit", *argv], parser_kwargs={"prog": "lowprec"})
    return 0
