"""The tensors of a live model as a source, and the weights of a model with a LoRA adapter of PEFT.

`checkpoints/weights.py` has the sources that are checkpoints. An adapter is merged into the weights, or kept in a
folder of its own:

model.layers.0.self_attn.q_proj.base_layer.weight          [N, K], the model's weight
model.layers.0.self_attn.q_proj.lora_A.default.weight      [r, K]
model.layers.0.self_attn.q_proj.lora_B.default.weight      [N, r]

merged = weight + scaling * lora_B @ lora_A                scaling = lora_alpha / r, with rsLoRA lora_alpha / sqrt(r)
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.checkpoints.optimizer_state import clean
from lightning_lowprec.checkpoints.weights import Source, rows_of, shapes_of
from lightning_lowprec.extras import require
from lightning_lowprec.private.torch import with_local_tensor

FOLDER: Final = "adapter"
"""The folder, in the exported one, of an adapter that is not merged."""
_MATRIX: Final = re.compile(r"(?P<layer>.+)\.(?P<matrix>lora_[AB])\.(?P<adapter>[^.]+)\.weight")
_REFUSED: Final = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices")


# ---- live models


def live_model(model: nn.Module) -> Source:
    """Return a model's tensors; of a sharded one, all ranks read the same rows in the same order, and gather them."""
    tensors = named_tensors(model)
    gathered: dict[str, Tensor] = {}

    @torch.no_grad()
    def rows(name: str, start: int, stop: int) -> Tensor:
        tensor = tensors[name].detach()
        if isinstance(tensor, DTensor):
            if name not in gathered:
                gathered.clear()  # frees the last one first
                plain: Any = with_local_tensor(_plain_class(tensor.to_local()), tensor)
                gathered[name] = plain.full_tensor()
            tensor = gathered[name]
        return _plain_class(rows_of(tensor, start, stop))

    return Source(shapes_of(tensors), rows)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict by name, without names of wrappers; a tied tensor once."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[clean(name)] = tensor
    return tensors


def _plain_class(tensor: Tensor) -> Tensor:
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def renamed(source: Source, names: Mapping[str, str]) -> Source:
    """Return some tensors of a source under other names: ``names`` has the stored name by the new one."""
    shapes = {name: source.shapes[stored] for name, stored in names.items()}
    return Source(shapes, lambda name, *span: source.rows(names[name], *span))


# ---- adapters


def model_name(name: str) -> str:
    """Return the name that a tensor or module has in the model without wrappers and adapters."""
    return clean(name).replace(".base_layer", "")


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor or module belongs to an adapter."""
    return ".lora_" in name or ".modules_to_save." in name


@final
class WithoutAdapter(Source):
    """The weights of a model with an adapter, by the names of the model without it; ``merge`` adds the adapter.

    ``config`` is PEFT's, as ``adapter_config.json`` has it; None: there is no adapter.
    """

    def __init__(self, source: Source, config: Mapping[str, Any] | None, *, merge: bool) -> None:
        self._source = source
        self._weights = renamed(source, {model_name(n): n for n in source.shapes if not is_of_adapter(n)})
        super().__init__(self._weights.shapes, self._rows)
        self._matrices: dict[str, dict[str, str]] = {}
        """By weight of the model: the names of the two matrices."""
        adapters, others = set(), []
        for name in filter(is_of_adapter, source.shapes):
            parts = _MATRIX.fullmatch(clean(name))
            if parts is None:
                others.append(name)
                continue
            adapters.add(parts["adapter"])
            self._matrices.setdefault(f"{parts['layer']}.weight", {})[parts["matrix"]] = name
        if others or len(adapters) > 1:
            shown = repr(others[0]) if others else f"the adapters {', '.join(sorted(adapters))}"
            raise ValueError(f"the model has {shown}; expected one plain LoRA adapter. Merge it by PEFT before.")
        self._config = dict(config or {})
        if self._matrices:
            self._check()
        elif merge:
            raise ValueError("`merge_adapters=True` is not valid: the model has no LoRA adapter. Leave it out.")
        if merge and (elsewhere := self._matrices.keys() - self._weights.shapes.keys()):
            raise ValueError(
                f"`merge_adapters=True` is not valid: the adapter of {min(elsewhere).removesuffix('.weight')!r} belongs"
                " to a Parameter of its own (PEFT's `target_parameters`), and only those of layers are merged here."
                " Merge the adapter by PEFT before, or leave the argument out: the adapter is then exported beside it."
            )
        self.layers = len(self._matrices)
        """The number of layers with an adapter."""
        self.merged = frozenset(self._matrices if merge else ())
        """The names of the weights that an adapter is added to."""

    def _check(self) -> None:
        if not self._config:
            raise ValueError(
                f"the checkpoint has a LoRA adapter ({len(self._matrices)} layers), and its scaling is not in the"
                " checkpoint. Give PEFT's `adapter_config.json`, or its folder, with `--adapter_config`."
            )
        for name in _REFUSED:
            if self._config.get(name):
                raise ValueError(
                    f"the adapter has `{name}={self._config[name]!r}`, which is not supported here. Merge"
                    " the adapter by PEFT before."
                )

    def _rows(self, name: str, start: int, stop: int) -> Tensor:
        values = self._weights.rows(name, start, stop)
        if name not in self.merged:
            return values
        a, b = (self._source.whole(self._matrices[name][matrix]).float() for matrix in ("lora_A", "lora_B"))
        rank, alpha = a.shape[0], self._config["lora_alpha"]
        scaling = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        part = a.t()[start:stop] @ b.t() if self._config.get("fan_in_fan_out") else b[start:stop] @ a
        merged: Tensor = (values.float() + scaling * part).to(values.dtype)
        return merged

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the matrices of the adapter by PEFT's names; of a sharded model, all ranks call this."""
        return {
            f"base_model.model.{weight.removesuffix('.weight')}.{matrix}.weight": (
                self._source.whole(name).float().to(dtype).clone()
            )
            for weight, matrices in self._matrices.items()
            for matrix, name in matrices.items()
        }

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write the adapter's matrices to a folder that PEFT loads."""
        library = require("safetensors.torch", "a LoRA adapter")
        folder.mkdir()
        library.save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {**self._config, "inference_mode": True}
        text = json.dumps(
            config, indent=2, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
        )
        (folder / "adapter_config.json").write_text(f"{text}\n")


def config_of(model: object) -> Mapping[str, Any] | None:
    """Return the config of a live model's adapter; None without one."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    config: Mapping[str, Any] = next(iter(configs.values())).to_dict()
    return config
