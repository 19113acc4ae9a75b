"""The recipe of anemoi-training: weather models of ECMWF, whose runs are made from a Hydra configuration.

Its trainer has a strategy of its own, which derives from DDP's, and its callback pickles the model in the middle of the
fit: ``inference-last.ckpt`` is what forecasts are made from. The data are random numbers on a coarse grid.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

GIVEN: Final = ["cos_latitude", "sin_latitude"]
"""Variables that the model is given, and does not forecast."""
STEPS: Final = 2
"""The time steps that a forecast is made from, which is anemoi's default."""


def _weather(degrees: int) -> dict[str, Any]:
    """Return anemoi's description of synthetic data on a grid of this width."""
    return {
        "synthetic": {
            "layout": "gridded",
            "geography": {"bbox": [80, 0, -80, 340], "resolution": degrees},
            "variables": [*GIVEN, "t_500", "t_850"],
            "dates": {"start": "2020-01-01", "end": "2020-01-20", "frequency": "6h"},
        }
    }


def _changes(precision: str, folder: Path) -> dict[str, Any]:
    """Return what differs from anemoi's configuration ``debug``: sizes, data, folders, and the precision."""
    coarse = {"_target_": "anemoi.graphs.nodes.AnemoiDatasetNodes", "dataset": {"dataset": _weather(40)}}
    return {
        "config_validation": False,
        "data.datasets.data.forcing": GIVEN,
        "data.datasets.data.diagnostic": [],
        "data.datasets.data.processors.normalizer.config": {"default": "mean-std", "none": GIVEN},
        "dataloader.limit_batches.validation": 1,
        "dataloader.num_workers": {"training": 1, "validation": 1},
        "dataloader.pin_memory": False,
        "dataloader.training.datasets.data.start": None,
        "dataloader.training.datasets.data.end": "2020-01-15",
        "dataloader.validation.datasets.data.start": "2020-01-16",
        "dataloader.validation.datasets.data.end": None,
        "diagnostics.benchmark_profiler": {},
        "diagnostics.enable_progress_bar": False,
        "diagnostics.log": {"interval": 1, "mlflow": {"enabled": False}},
        "diagnostics.plot.callbacks": [],
        "graph.nodes.hidden.node_builder": coarse,
        "model.bounding": [],
        "model.compile": [],
        "model.decoder.graph_attention_backend": "pyg",
        "model.encoder.graph_attention_backend": "pyg",
        "model.num_channels": 64,
        "model.processor.attention_implementation": "scaled_dot_product_attention",
        "model.processor.num_chunks": 1,
        "model.processor.num_layers": 2,
        "system.hardware.accelerator": "cpu",
        "system.input.dataset": _weather(20),
        "system.input.graph": None,
        "system.output.root": str(folder),
        "training.lr.rate": 1e-3,
        "training.lr.warmup": 1,
        "training.max_steps": 5,
        "training.metrics.datasets.data": [],
        "training.num_sanity_val_steps": 0,
        "training.precision": precision,
    }


def anemoi_training(precision: str, folder: Path) -> tuple[float, Any, Any]:
    """A graph transformer; ``training.precision`` goes to the Trainer. The file is the pickle that forecasts."""
    import torch
    from anemoi.training.train.train import AnemoiTrainer
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    os.environ["ANEMOI_BASE_SEED"] = "1"
    with initialize_config_module("anemoi.training.config", version_base=None):
        config = compose("debug", overrides=["model=transformer", "graph=encoder_decoder_only"])
    OmegaConf.set_struct(config, False)
    for key, value in _changes(precision, folder).items():
        OmegaConf.update(config, key, value, merge=False)
    client = AnemoiTrainer(config)
    client.train()
    (file,) = folder.rglob("inference-last.ckpt")
    batch = next(iter(client.datamodule.val_dataloader()))["data"][:, :STEPS, 0]
    before, after = (
        model.eval().predict_step({"data": batch})["data"]
        for model in (client.model.model, torch.load(file, weights_only=False))
    )
    return client.model.trainer.callback_metrics["train_multi_dataset_loss_epoch"], before, after
