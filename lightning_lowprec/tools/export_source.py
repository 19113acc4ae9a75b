"""Find a model's tensors in a checkpoint: by name, behind the prefix of a LightningModule's attribute."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor
from typing_extensions import override

from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.checkpoints.weights import Shape, Source
from lightning_lowprec.conversion import backends
from lightning_lowprec.precision.state import BACKEND_STATE
from lightning_lowprec.serving.sources import is_of_adapter, model_name

_SHOWN: Final = 3
_ADAPTER_CONFIG: Final = "adapter_config.json"


def backend_of(content: Any) -> str | None:
    """Return the name of the backend that a checkpoint says it was trained by; None: it does not say."""
    if not isinstance(content, Mapping):
        return None
    names = {backend.name for backend in backends.registered()}
    states = [value for value in content.values() if isinstance(value, Mapping)]
    return next((str(s[BACKEND_STATE]) for s in states if s.get(BACKEND_STATE) in names), None)


def read_config(path: Path) -> dict[str, Any]:
    """Return the config of a LoRA adapter, as PEFT writes it, of a file, or of the folder that holds one.

    Raises:
        ValueError: there is no such file, or it is no config of LoRA.
    """
    file = path / _ADAPTER_CONFIG if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"`adapter_config={str(path)!r}` is not valid; expected {_ADAPTER_CONFIG} of PEFT, or its folder."
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON file: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA" or "lora_alpha" not in config:
        raise ValueError(f"{str(file)!r} is no config of a LoRA adapter; expected `peft_type='LORA'`, `lora_alpha`.")
    return config


@final
class Renamed(Source):
    """The tensors of a checkpoint that a model has, by the model's names.

    Args:
        source: the checkpoint.
        wanted: the tensors of the model.
        known: all names of the model's tensors, also of tied ones and of buffers that no state dict holds.
        prefix: removed from every name; None: the prefix is found. Names without the prefix are left out.

    Raises:
        ValueError: the checkpoint is of another model, or holds codes of low precision.
    """

    def __init__(self, source: Source, wanted: Mapping[str, Shape], known: Collection[str], prefix: str | None) -> None:
        self._source = source
        names = {clean(name): name for name in source.shapes}
        _check_high_precision(source)
        prefix = _prefix(names, wanted) if prefix is None else prefix
        found = {name.removeprefix(prefix): own for name, own in names.items() if name.startswith(prefix)}
        self._names = {n: own for n, own in found.items() if model_name(n) in wanted or is_of_adapter(n)}
        present = {model_name(name): source.shapes[own].size for name, own in self._names.items()}
        missing = [name for name in wanted if name not in present]
        strange = [name for name in found if name not in self._names and model_name(name) not in known]
        wrong = [name for name, size in present.items() if name in wanted and size != wanted[name].size]
        if missing or wrong or strange:
            raise ValueError(_another_model(missing, strange, [_sizes(n, present[n], wanted[n].size) for n in wrong]))
        self.left_out = len(names) - len(found)
        """The number of tensors without the prefix, which belong to other modules than the model."""
        self.shapes = {name: source.shapes[stored] for name, stored in self._names.items()}

    @override
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.rows(self._names[name], start, stop)


def _prefix(names: Mapping[str, str], wanted: Mapping[str, Shape]) -> str:
    """Return the prefix with which most names of the model are in the checkpoint."""
    plain = {model_name(name) for name in names}
    candidates = {""} | {name.removesuffix(last) for last in list(wanted)[-4:] for name in plain if name.endswith(last)}
    return max(sorted(candidates), key=lambda prefix: sum(prefix + name in plain for name in wanted))


def _check_high_precision(source: Source) -> None:
    coded = [n for n, shape in source.shapes.items() if shape.dtype.itemsize == 1 and shape.dtype != torch.bool]
    if coded:
        raise ValueError(
            f"the checkpoint holds codes of low precision ({coded[0]!r} is"
            f" {str(source.shapes[coded[0]].dtype).removeprefix('torch.')}), so it was exported or quantised already."
            " Give the checkpoint of the training run."
        )


def _another_model(missing: list[str], strange: list[str], wrong: list[str]) -> str:
    parts = [
        f"{text} {len(names)}: {', '.join(map(repr, names[:_SHOWN]))}{', ...' if len(names) > _SHOWN else ''}"
        for text, names in (("lacks", missing), ("has beside them", strange))
        if names
    ]
    parts += [f"{len(wrong)} have other shapes: {'; '.join(wrong[:_SHOWN])}"] if wrong else []
    return (
        f"the checkpoint is of another model than `--model`: of the model's tensors it {'; '.join(parts)}. Give the"
        " config of the model that was trained, `--key` for the key of the weights, or `--strip_prefix` for what stands"
        " before every name."
    )


def _sizes(name: str, stored: torch.Size, wanted: torch.Size) -> str:
    return f"{name!r} is {tuple(stored)} in the checkpoint and {tuple(wanted)} in the model"
