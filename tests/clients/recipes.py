"""Clients: other people's packages of Lightning, each through its own public interface, with data made on the fly.

A recipe fits a client under a precision, predicts, saves, reads the file again and predicts again. It returns the
last training loss (of a step or an epoch, as the client logs it) and both predictions. Hidden sizes are multiples of
16, as FP8 asks; everything else is as small as the client allows.

    python -m tests.clients.recipes CLIENT PRECISION ...      # behind the log of each run, its outcome as JSON
"""

import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import lightning.pytorch as pl
import numpy as np
import torch

from tests.clients.detection import rfdetr
from tests.clients.speech import nemo_toolkit

Run = tuple[float, Any, Any]
"""The training loss, the predictions, and the predictions of the client that was read from its file."""
QUIET: Final = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
SERIES: Final = np.sin(np.arange(240) / 5).astype("float32")


def darts(precision: str, folder: Path) -> Run:
    from darts import TimeSeries
    from darts.models import TSMixerModel

    series = TimeSeries.from_values(SERIES)
    client = TSMixerModel(
        *(32, 16), hidden_size=32, ff_size=32, n_epochs=2, pl_trainer_kwargs={"precision": precision, **QUIET}
    )
    client.fit(series)
    client.save(str(folder / "model.pt"))
    again = TSMixerModel.load(str(folder / "model.pt"))
    loss = client.trainer.callback_metrics["train_loss"]
    return loss, client.predict(16).values(), again.predict(16).values()


def pytorch_forecasting(precision: str, folder: Path) -> Run:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    frame = pd.DataFrame({"value": SERIES, "time": range(len(SERIES)), "group": "a"})
    data = TimeSeriesDataSet(
        *(frame, "time", "value", ["group"]),
        max_encoder_length=32,
        max_prediction_length=16,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    client = TemporalFusionTransformer.from_dataset(
        data, hidden_size=32, attention_head_size=2, hidden_continuous_size=16, dropout=0.0
    )
    trainer = pl.Trainer(precision=precision, max_steps=5, gradient_clip_val=0.1, **QUIET)
    trainer.fit(client, data.to_dataloader(batch_size=32))
    trainer.save_checkpoint(folder / "model.ckpt")
    again = TemporalFusionTransformer.load_from_checkpoint(folder / "model.ckpt")
    ordered = data.to_dataloader(train=False, batch_size=32)
    before, after = (
        model.predict(ordered, trainer_kwargs={"precision": precision, **QUIET}) for model in (client, again)
    )
    return trainer.callback_metrics["train_loss_step"], before.float(), after.float()


def scvi_tools(precision: str, folder: Path) -> Run:
    """scVI, whose ``train`` passes ``precision`` to the Trainer; the latent space is computed without a Trainer."""
    import scvi

    cells = scvi.data.synthetic_iid(n_genes=96)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    client = scvi.model.SCVI(cells, n_hidden=64, n_latent=16)
    client.train(max_epochs=2, precision=precision, accelerator="cpu", enable_progress_bar=False)
    client.save(str(folder / "model"))
    again = scvi.model.SCVI.load(str(folder / "model"), cells)
    loss = client.history["elbo_train"].iloc[-1, 0]
    return loss, client.get_latent_representation(), again.get_latent_representation()


def timm(precision: str, folder: Path) -> Run:
    """A vision transformer in a user's LightningModule."""
    import timm

    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "num_classes": 16}
    images, labels = torch.randn(32, 3, 32, 32), torch.arange(32) % 16
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=16)

    class User(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = timm.create_model("vit_tiny_patch16_224", **sizes)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    client = User()
    trainer = pl.Trainer(precision=precision, max_epochs=5, **QUIET)
    trainer.fit(client, loader)
    loss = trainer.callback_metrics["train_loss"]
    trainer.save_checkpoint(folder / "model.ckpt")
    again = User.load_from_checkpoint(folder / "model.ckpt")
    before, after = (torch.cat(trainer.predict(model, loader)).float() for model in (client, again))
    return loss, before, after


def litgpt(precision: str, folder: Path) -> Run:
    from litgpt import GPT, Config

    config = Config(block_size=32, n_layer=2, n_embd=64, n_head=4, padded_vocab_size=128)
    return _in_fabric(lambda: GPT(config), precision, folder)


def litgpt_lora(precision: str, folder: Path) -> Run:
    """Adapters on the frozen layers of the same GPT."""
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    sizes = {"block_size": 32, "n_layer": 2, "n_embd": 64, "n_head": 4, "padded_vocab_size": 128}
    where = dict.fromkeys(["lora_query", "lora_key", "lora_value", "lora_projection", "lora_mlp"], True)
    config = Config(**sizes, lora_r=16, lora_alpha=32, **where)

    def make() -> Any:
        model = GPT(config)
        mark_only_lora_as_trainable(model)
        return model

    return _in_fabric(make, precision, folder)


def _in_fabric(make: Callable[[], Any], precision: str, folder: Path) -> Run:
    from lightning.fabric import Fabric
    from litgpt.utils import chunked_cross_entropy

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    with fabric.init_module():
        client = make()
    params = [p for p in client.parameters() if p.requires_grad]
    client, optimizer = fabric.setup(client, torch.optim.AdamW(params, lr=1e-3))
    tokens = torch.randint(128, (8, 33))
    for _ in range(10):
        loss = chunked_cross_entropy(client(tokens[:, :-1]), tokens[:, 1:], chunk_size=0)
        fabric.backward(loss)
        fabric.clip_gradients(client, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(folder / "model.pth", {"model": client})
    again = fabric.setup(make())
    fabric.load(folder / "model.pth", {"model": again})
    with torch.no_grad():
        before, after = (model.eval()(tokens[:, :-1]).float() for model in (client, again))
    return loss.item(), before, after


CLIENTS: Final[Mapping[str, Callable[[str, Path], Run]]] = {
    "darts": darts,
    "pytorch-forecasting": pytorch_forecasting,
    "scvi-tools": scvi_tools,
    "timm": timm,
    "rfdetr": rfdetr,
    "nemo-toolkit": nemo_toolkit,
    "litgpt": litgpt,
    "litgpt-lora": litgpt_lora,
}
"""The recipes by the name of the package that `pip` installs."""
PACKAGES: Final = {"litgpt-lora": "litgpt"}
"""The packages of recipes that have another name."""
MODULES: Final = {"scvi-tools": "scvi", "litgpt-lora": "litgpt", "nemo-toolkit": "nemo.collections.asr"}
"""The modules to import, where a package does not have its own name."""
SECONDS: Final = 300
"""The time limit of a run, which takes 2 to 40 seconds on a quiet core."""
OURS: Final = "lightning_lowprec"


def is_refusal(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.sep}{OURS}{os.sep}" in last.filename and (last.line or "").startswith("raise ")


def run(client: str, precision: str) -> dict[str, Any]:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO)
    torch.manual_seed(0)
    np.random.seed(0)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            loss, before, after = CLIENTS[client](precision, Path(folder))
    except Exception as error:  # whatever the client or this package raises is the outcome
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "refused": is_refusal(error)}
    before, after = (np.asarray(values, dtype="float64") for values in (before, after))
    return {"loss": float(loss), "differs": float(np.abs(before - after).max() / np.abs(before).max())}


def main(client: str, *precisions: str) -> None:
    """Run a recipe in one process for each precision; print each outcome as a line of JSON."""
    importlib.import_module(MODULES.get(client, client.replace("-", "_")))  # once for all processes
    for precision in precisions:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            signal.alarm(SECONDS)
            print(json.dumps({"name": precision, **run(client, precision)}), flush=True)
            os._exit(0)
        if status := os.waitpid(child, 0)[1]:
            fault = f"the process ended with status {status}, or took more than {SECONDS} s"
            print(json.dumps({"name": precision, "error": fault, "refused": False}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
