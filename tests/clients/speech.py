"""The recipe of NeMo Speech: a small Conformer with CTC, which learns two letters per tone.

nemo-toolkit 3.0 asks for ``lightning<=2.4.0``, so it has an environment of its own. Its importing takes a minute.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

LETTERS: Final = list("abcdefghi")
RATE: Final = 16000


def _recordings(folder: Path) -> Path:
    import soundfile

    lines = []
    for number, letters in enumerate(pairwise(LETTERS), start=1):
        tone = np.sin(2 * np.pi * 200 * number * np.arange(RATE) / RATE)
        soundfile.write(folder / f"{number}.wav", tone.astype("float32"), RATE)
        entry = {"audio_filepath": str(folder / f"{number}.wav"), "duration": 1.0, "text": "".join(letters)}
        lines.append(json.dumps(entry))
    (folder / "train.json").write_text("\n".join(lines))
    return folder / "train.json"


def _config(folder: Path) -> Any:
    from omegaconf import OmegaConf

    modules = "nemo.collections.asr.modules"
    dropouts = dict.fromkeys(["dropout", "dropout_pre_encoder", "dropout_emb", "dropout_att"], 0.0)
    sizes = {"feat_in": 32, "n_layers": 2, "d_model": 64, "n_heads": 4, "conv_kernel_size": 9}
    subsampling = {"subsampling_factor": 4, "subsampling_conv_channels": 16}
    data = {"batch_size": 8, "shuffle": False, "num_workers": 0}
    return OmegaConf.create(
        {
            "sample_rate": RATE,
            "labels": LETTERS,
            "train_ds": {"manifest_filepath": str(_recordings(folder)), "sample_rate": RATE, "labels": LETTERS, **data},
            "preprocessor": {
                "_target_": f"{modules}.AudioToMelSpectrogramPreprocessor",
                "features": 32,
                "dither": 0.0,
                "pad_to": 0,
            },
            "encoder": {"_target_": f"{modules}.ConformerEncoder", **sizes, **subsampling, **dropouts},
            "decoder": {
                "_target_": f"{modules}.ConvASRDecoder",
                "feat_in": 64,
                "num_classes": len(LETTERS),
                "vocabulary": LETTERS,
            },
            "optim": {"name": "adamw", "lr": 1e-3},
        }
    )


def nemo_toolkit(precision: str, folder: Path) -> tuple[float, Any, Any]:
    """Twelve steps, and twelve more of a new model and Trainer from the checkpoint; the file is NeMo's own.

    The loss is the mean of the last twelve steps of three seeds: it falls from 49 to 6 in the first ten steps, and
    swings from step to step.
    """
    import lightning.pytorch as pl
    import torch
    from nemo.collections.asr.models import EncDecCTCModel

    from tests.clients.recipes import QUIET

    config = _config(folder)
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))

    def fit(seed: int, steps: int, checkpoint: Path | None = None) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        trainer = pl.Trainer(
            precision=precision, max_steps=steps, enable_checkpointing=False, callbacks=Losses(), **QUIET
        )
        client = EncDecCTCModel(config, trainer)
        trainer.fit(client, ckpt_path=checkpoint)
        return client, trainer

    last: list[float] = []
    for seed in range(3):
        _, trainer = fit(seed, 12)
        trainer.save_checkpoint(folder / "half.ckpt")
        losses.clear()
        client, _ = fit(seed, 24, folder / "half.ckpt")
        last += losses
    client.save_to(str(folder / "model.nemo"))
    again = EncDecCTCModel.restore_from(str(folder / "model.nemo"))
    sound = {"input_signal": torch.randn(2, RATE), "input_signal_length": torch.tensor([RATE, RATE])}
    with torch.no_grad():
        before, after = (model.eval()(**sound)[0] for model in (client, again))
    assert len(last) == 36
    return sum(last) / len(last), before, after
