"""The recipe of RF-DETR: its smallest detector from random weights, on pictures with one square each."""

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

SIZE: Final = 64
SQUARE: Final = 24
COLOURS: Final = ["red", "green", "blue"]


def _pictures(folder: Path) -> Path:
    from PIL import Image

    random = np.random.default_rng(0)
    for split in ("train", "valid"):
        place = folder / "pictures" / split
        place.mkdir(parents=True)
        images, squares = [], []
        for number in range(8):
            x, y = (int(value) for value in random.integers(0, SIZE - SQUARE, 2))
            colour = number % len(COLOURS)
            picture = random.integers(0, 60, (SIZE, SIZE, 3), dtype="uint8")
            picture[y : y + SQUARE, x : x + SQUARE, colour] = 220
            Image.fromarray(picture).save(place / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "width": SIZE, "height": SIZE})
            box = {"bbox": [x, y, SQUARE, SQUARE], "area": SQUARE**2, "iscrowd": 0}
            squares.append({"id": number, "image_id": number, "category_id": colour + 1, **box})
        kinds = [{"id": i, "name": name, "supercategory": "none"} for i, name in enumerate(COLOURS, start=1)]
        table = {"images": images, "annotations": squares, "categories": kinds}
        (place / "_annotations.coco.json").write_text(json.dumps(table))
    return folder / "pictures"


def rfdetr(precision: str, folder: Path) -> tuple[float, Any, Any]:
    """``precision`` is an argument of RF-DETR's ``build_trainer``; the file is Lightning's checkpoint."""
    import torch
    from rfdetr.config import RFDETRNanoConfig, TrainConfig
    from rfdetr.training import RFDETRDataModule, RFDETRModelModule, build_trainer

    sizes = {"resolution": SIZE, "num_queries": 10, "num_select": 10, "group_detr": 1, "num_classes": len(COLOURS)}
    model = RFDETRNanoConfig(pretrain_weights=None, device="cpu", **sizes)
    plain = {"multi_scale": False, "scale_jitter": False, "aug_config": {}, "augmentation_backend": "torchvision"}
    places = {"dataset_dir": str(_pictures(folder)), "output_dir": str(folder / "out")}
    fit = TrainConfig(epochs=1, batch_size=2, num_workers=0, tensorboard=False, **plain, **places)
    limits = {"limit_train_batches": 4, "limit_val_batches": 1, "enable_model_summary": False}
    client = RFDETRModelModule(model, fit)
    trainer = build_trainer(fit, model, accelerator="cpu", precision=precision, **limits)
    trainer.fit(client, RFDETRDataModule(model, fit))
    trainer.save_checkpoint(folder / "model.ckpt")
    again = RFDETRModelModule(model, fit)
    again.load_state_dict(torch.load(folder / "model.ckpt", weights_only=False)["state_dict"])
    pictures = torch.rand(2, 3, SIZE, SIZE)
    with torch.no_grad():
        before, after = (module.eval().model(pictures)["pred_logits"] for module in (client, again))
    return trainer.callback_metrics["train/loss"], before, after
