"""Build a model on the meta device from a class path or a transformers config."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lightning_lowprec.extras import require
from lightning_lowprec.tools.class_path import load_class

_EXPECTED: Final = (
    "expected a class path ('my.Model', 'file.py:Model'), a config.json or its folder, or a model type of transformers"
    " such as 'llama'"
)
_KERNELS: Final = {
    *("_attn_implementation", "attn_implementation", "_attn_implementation_internal"),
    *("_experts_implementation", "experts_implementation", "_experts_implementation_internal"),
}
_KNOWN_KERNELS: Final = (
    *("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    *("batched_mm", "grouped_mm"),
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model on the meta device, without weights."""

    model: nn.Module
    origin: str
    attention_width: int = 0
    """Heads x head_dim x layers; 0 if the model's attention is not known."""


def load(source: str, arguments: Mapping[str, object]) -> Source:
    """Build the model that ``source`` names, without downloads and without memory for weights.

    ``source`` is what ``lowprec plan`` takes. The ``arguments`` are those of the class, or change fields of the config.
    """
    path = Path(source)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        values = read_json(path, "a config.json of transformers")
        return _from_config({**values, **arguments}, f"transformers config {path.name}")
    if path.suffix == ".py":
        raise ValueError(f"{source!r} names no class; expected {source}:Model, with the name of the class.")
    if path.exists() or path.suffix == ".json" or (os.sep in source and ":" not in source):
        raise ValueError(f"{source!r} is no model; {_EXPECTED}.")
    if "." in source or ":" in source:
        return _from_class(source, arguments)
    return _from_config({"model_type": source, **arguments}, f"transformers defaults of {source!r}")


def _from_class(path: str, arguments: Mapping[str, object]) -> Source:
    factory = load_class(path)
    with torch.device("meta"):
        model = factory(**arguments)
        if hasattr(model, "configure_model"):
            model.configure_model()
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path!r} makes a {type(model).__name__}; expected a LightningModule or a Module.")
    return Source(model=model, origin=path)


def read_json(path: Path, expected: str) -> dict[str, object]:
    """Return the content of a file of JSON, which is a mapping; else raise ValueError."""
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON file: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{str(path)!r} holds a {type(values).__name__}; expected {expected}.")
    return values


def _without_kernels(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return a config without its choice of attention and experts, which a plan does not need.

    transformers takes such a choice for a repository of kernels if it has a slash, and fetches and imports that.
    """
    for name in _KERNELS & values.keys():
        for word in values[name].values() if isinstance(values[name], Mapping) else [values[name]]:
            if word is not None and word not in _KNOWN_KERNELS:
                raise ValueError(f"the {origin} has {name}={word!r}; expected one of: {', '.join(_KNOWN_KERNELS)}.")
    return {
        name: _without_kernels(value, origin) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in _KERNELS
    }


def _architecture(transformers: Any, config: Any, origin: str) -> Any:
    """Return the class of models that a config names; None if it names none, or none that this transformers has."""
    names = config.architectures or []
    name = names[0] if isinstance(names, list | tuple) and names else None
    if name is None and not names:
        return None
    found = getattr(transformers, name, None) if isinstance(name, str) else names
    if found is not None and not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"the {origin} has architectures={names!r}; expected the name of a model of transformers.")
    return found


def _from_config(values: Mapping[str, object], origin: str) -> Source:
    transformers = require("transformers", origin)
    if not isinstance(values.get("model_type"), str):
        raise ValueError(f"the {origin} has no `model_type`; expected the config.json of a transformers model.")
    values = _without_kernels(values, origin)
    try:
        config = transformers.AutoConfig.for_model(**values)
    except Exception as error:  # classes of transformers raise errors of many libraries for wrong values
        if values["model_type"] in transformers.CONFIG_MAPPING:
            raise ValueError(f"the {origin} has values that transformers refuses: {error}") from error
        raise ValueError(f"{values['model_type']!r} is no model; {_EXPECTED}.") from error
    architecture = _architecture(transformers, config, origin)
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    automatic = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    try:
        with torch.device("meta"):
            model = automatic.from_config(config) if architecture is None else architecture(config)
    except Exception as error:
        raise ValueError(f"the {origin} has values that make no model: {type(error).__name__}: {error}") from error
    return Source(model=model, origin=origin, attention_width=_attention_width(config))


def _attention_width(config: object) -> int:
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    hidden = getattr(config, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return 0
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return int(heads * head_dim * layers)
