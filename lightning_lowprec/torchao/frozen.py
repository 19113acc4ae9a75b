"""Frozen weights of converted layers as codes and scales alone: a byte per parameter, read by the products as they are.

    weight          uint8 Parameter          the bytes of the float8 codes
    weight_scale    int32 buffer             the bits of the float32 scales, in no state dict

    set-up, load_state_dict, after a merge          encode, as the forward encodes such a weight
    forward, grad_input                             the bytes and bits, viewed as codes and scales
    state_dict, export, merge, after fit            decode, to the dtype that the weight had

Integers, because no cast (``model.bfloat16()``, autocast) and no average takes them for values, and gloo sends them.
The values of bfloat16 encode to the same codes and scales again: rounding moves a value by less than a half of a step
between codes, and moves the largest value, which decides the scale, back to where it was.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_lowprec.conversion.declared import PlainFirst
from lightning_lowprec.conversion.in_place import RoleModule, become, derived, revert
from lightning_lowprec.conversion.matmuls import is_conv1d
from lightning_lowprec.messages import dtype_name, info
from lightning_lowprec.numerics.tiles import largest_of_rows
from lightning_lowprec.private.torch import local_tensor, with_local_tensor
from lightning_lowprec.products.linear import in_high_precision
from lightning_lowprec.torchao.settings import LayerSettings

WAY_OUT: Final = "Use `frozen='convert'`, which keeps the values of frozen weights"


@final
class Bytes(nn.Parameter):
    """A Parameter of codes, which nobody can unfreeze: torch's own error would not say what to do."""

    @property
    def requires_grad(self) -> bool:
        """Always False."""
        return False

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> "Bytes":
        """Refuse True."""
        if requires_grad:
            raise RuntimeError(
                "A weight that is stored as codes (`frozen='codes'`) cannot train. Unfreeze it before Trainer or Fabric"
                f" set the model up, or call `lightning_lowprec.plain(model)` before. {WAY_OUT}."
            )
        return self


class StoresCodes(PlainFirst):
    """The part of a layer that may store its weight as codes."""

    weight: Any
    weight_scale: Tensor
    bias: Any
    settings: LayerSettings
    values_dtype: torch.dtype | None
    """The dtype of the weight whose codes are stored; None: the weight holds values."""
    tied: "Sequence[StoresCodes]"
    """The other layers with the same weight of codes: each has the scale, since a device moves buffers one by one."""

    def codes_of(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the codes in the weight, or in a padded copy, and the scales; without codes the weight, and None."""
        if self.values_dtype is None:
            return weight, None
        by: Any = self.settings.products.forward
        return weight.view(by.coding("weight").dtype), self.weight_scale.view(torch.float32)

    @torch.no_grad()
    def values(self) -> Tensor:
        """Return the values, in the dtype that the weight had; the weight itself if it holds values."""
        if self.values_dtype is None:
            return cast(Tensor, self.weight)
        by: Any = self.settings.products.forward
        codes, scale = self.codes_of(local_tensor(self.weight.detach()))
        values = by.decode(codes, scale, first=_first_row(self.weight))
        return with_local_tensor(values.to(self.values_dtype), self.weight)

    @torch.no_grad()
    def encoded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of codes, of a shard those of the shard, and the bits of the scales."""
        wire: Any = self.settings.wire_format
        local, first = local_tensor(values.detach()), _first_row(values)
        if wire.tile is not None:
            amax = largest_of_rows(local, wire.tile, values.shape[0], first)
        else:
            amax = local.abs().amax().float() if local.numel() else torch.zeros((), device=local.device)
        if isinstance(values, DTensor):
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=values.device_mesh.get_group(-1))
        scale = wire.scales(amax)
        codes = wire.encode(local, scale, first=first).contiguous()
        return with_local_tensor(codes.view(torch.uint8), values), scale.contiguous().view(torch.int32)

    def store_codes(self, tied: "Sequence[StoresCodes]") -> None:
        """Put codes in the place of the values; ``tied``: the other layers with the same Parameter."""
        dtype, weight = self.weight.dtype, self.weight
        codes, scale = self.encoded(weight)
        layers = (self, *tied)
        for layer in layers:
            layer.values_dtype = dtype
            layer.tied = [other for other in layers if other is not layer]
            layer.register_buffer("weight_scale", scale, persistent=False)
        weight.data = codes
        weight.__class__ = Bytes

    def store_values(self) -> None:
        """Put the decoded values in the place of the codes."""
        if self.values_dtype is None:
            return
        if type(self.weight) is Bytes:  # else a layer with the same Parameter has done so
            weight: Any = self.weight
            values = self.values()
            weight.__class__, weight.data = nn.Parameter, values
        self.values_dtype = None
        self._non_persistent_buffers_set.discard("weight_scale")
        del self._buffers["weight_scale"]

    def plain_forward(self, input: Tensor) -> Tensor:
        """Compute as the layer did before it was converted, with the decoded values."""
        if self.values_dtype is None:
            return super().plain_forward(input)
        return in_high_precision(input, self.values(), self.bias, is_conv1d(self))

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.values_dtype is not None:
            destination[f"{prefix}weight"] = self.values()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: object) -> None:
        value = state_dict.get(f"{prefix}weight")
        if self.values_dtype is not None and isinstance(value, Tensor) and value.shape == self.weight.shape:
            codes, scale = self.encoded(value)
            state_dict[f"{prefix}weight"] = Bytes(codes, False) if type(self.weight) is Bytes else codes
            if local_metadata.get("assign_to_params_buffers"):  # torch gives this layer another weight
                for layer in self.tied:
                    layer.tied = [other for other in layer.tied if other is not self]
                self.weight_scale, self.tied = scale, ()
            for layer in (self, *self.tied):
                if layer.weight_scale.is_meta:
                    layer.weight_scale = scale
                else:
                    layer.weight_scale.copy_(scale)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def _first_row(weight: Tensor) -> int:
    if not isinstance(weight, DTensor):
        return 0
    mesh = weight.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1) * -(-weight.shape[0] // mesh.size(mesh.ndim - 1))


# ---- the adapters of PEFT


@final
class MergesIntoCodes(RoleModule):
    """A LoRA layer of PEFT over a layer of codes, which are decoded for a merge, and then encoded again."""

    def update_layer(self, adapter_name: str, *args: object, **kwargs: object) -> None:
        """Take one more adapter, which is a plain LoRA."""
        cast(Any, super()).update_layer(adapter_name, *args, **kwargs)
        _check_adapter(adapter_name, self)

    def merge(self, *args: object, **kwargs: object) -> None:
        """Merge adapters."""
        with _decoded(cast(Any, self).get_base_layer()):
            cast(Any, super()).merge(*args, **kwargs)

    def unmerge(self) -> None:
        """Subtract the adapters again."""
        with _decoded(cast(Any, self).get_base_layer()):
            cast(Any, super()).unmerge()


@contextmanager
def _decoded(layer: StoresCodes) -> Iterator[None]:
    if isinstance(layer.weight, DTensor):
        raise RuntimeError(
            "A LoRA adapter cannot be merged into a sharded weight of codes (`frozen='codes'`). Save a checkpoint, and"
            " merge by `lowprec export` with `--merge_adapters`."
        )
    if layer.values_dtype is None:
        yield
        return
    _say_merge()
    for each in (layer, *layer.tied):
        each.store_values()
    try:
        yield
    finally:
        layer.store_codes(layer.tied)


@functools.cache  # once per process: a model has hundreds of layers
def _say_merge() -> None:
    info(
        "frozen='codes': to merge or unmerge an adapter, weights are decoded, changed and encoded again, which rounds"
        " the sum to FP8. `lightning_lowprec.plain(model)` before the merge leaves the sum in high precision."
    )


def _check_adapter(fqn: str, module: object) -> None:
    """Raise for an adapter that may read the values of the layer below."""
    reads = [name for name in ("lora_variant", "use_dora") if any(dict(getattr(module, name, None) or {}).values())]
    if reads or not hasattr(module, "lora_A"):
        which = "an adapter of LoRA that is no plain one, such as DoRA" if reads else f"a {type(module).__name__}"
        _refuse(fqn, f"it is {which}, which may read the values of the weight")


def _refuse(fqn: str, why: str) -> NoReturn:
    raise ValueError(f"`frozen='codes'` is not possible for {fqn!r}: {why}. {WAY_OUT}.")


# ---- models


def store(model: nn.Module) -> str:
    """Store the frozen weights of the converted layers as codes, in place; return what was done in words."""
    layers = {fqn: m for fqn, m in model.named_modules() if isinstance(m, StoresCodes)}
    shared: dict[int, list[str]] = {}
    for fqn, layer in layers.items():
        weight = layer._parameters.get("weight")
        if weight is not None and not weight.requires_grad:
            shared.setdefault(id(weight), []).append(fqn)
    inside = {id(layer) for layer in layers.values()}
    outside = {id(p) for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)}
    for first, fqn in ((fqns[0], fqn) for fqns in shared.values() for fqn in fqns):
        if type(layers[fqn].weight) is not nn.Parameter or id(layers[fqn].weight) in outside:
            _refuse(fqn, "its weight is no plain Parameter, or another module reads the weight too")
        if layers[fqn].settings.wire_format is None:
            _refuse(fqn, "a product of its recipe runs in bf16, and reads the values of the weight")
        if layers[fqn].settings.wire_format != layers[first].settings.wire_format:
            _refuse(fqn, f"it shares its weight with {first!r}, whose recipe has other scales")
    if not shared:
        raise ValueError(
            "`frozen='codes'` finds no converted layer with a frozen weight. Freeze the base before Trainer or Fabric"
            " set the model up, as PEFT does, or leave `frozen` out."
        )
    stored = [layers[fqn] for fqns in shared.values() for fqn in fqns]
    above = {fqn: m for fqn, m in model.named_modules() if getattr(m, "base_layer", None) in stored}
    for fqn, module in above.items():
        _check_adapter(fqn, module)
    for module in above.values():
        become(module, derived(MergesIntoCodes, type(module)), {})
    for fqns in shared.values():
        layers[fqns[0]].store_codes([layers[fqn] for fqn in fqns[1:]])
    dtypes = " and ".join(sorted({dtype_name(layer.values_dtype) for layer in stored}))
    size = sum(layers[fqns[0]].weight.numel() for fqns in shared.values())
    return (
        f"{len(shared)} frozen weights are stored as codes (frozen='codes'), {size} bytes; state dicts, and the model"
        f" after fit, have the decoded values in {dtypes}, not the values from before"
    )


def restore(model: nn.Module) -> None:
    """Give the layers of ``model`` decoded values, and PEFT's layers their own class, in place."""
    for module in list(model.modules()):
        if isinstance(module, MergesIntoCodes):
            revert(module)
        elif isinstance(module, StoresCodes):
            module.store_values()
