"""Read the config of a LoRA adapter, as PEFT writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = "adapter_config.json"


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a file, or of the folder that holds one.

    Raises:
        ValueError: there is no such file, or it is no config of LoRA.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"`adapter_config={str(path)!r}` is not valid; expected {FILE} of PEFT, or its folder.")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON file: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or "lora_alpha" not in config:
        raise ValueError(f"{str(file)!r} is no config of a LoRA adapter; expected `peft_type='LORA'`, `lora_alpha`.")
    return config
