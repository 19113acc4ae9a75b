"""A weight of codes as one tensor: torch sees the values, the layers of MS-AMP take the codes.

    scale_weight_(param, level)                                        the parameter becomes codes; the object stays
    read    F.linear(x, weight), weight.pow(2).sum(), weight.dtype     the values; gradients reach ``weight.grad``
    write   weight.copy_(x), weight[0].mul_(2), weight.data += x       values that are encoded anew, with a new scale
    view    weight.t(), weight[0], weight.detach(), weight.data        codes of the same memory; a write reaches them
    copy    deepcopy, pickle, ``layer.to(device)``                     codes; ``weight.clone()`` gives the values

The same on one device, under DDP, and under FSDP2 as a shard and as a gathered weight. docs/architecture.md draws the
life of a weight. :class:`~lightning_lowprec.msamp.weight_state.MsampWeightState` has the arithmetic.
"""

from collections.abc import Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_lowprec.checks import check_choice
from lightning_lowprec.masters.float32_values import drop, raw
from lightning_lowprec.msamp.gradient import ScaledGradient
from lightning_lowprec.msamp.weight_state import LEVELS, Level, MsampWeightState, msamp_state_of, required_state_of
from lightning_lowprec.numerics.formats import E4M3
from lightning_lowprec.private import torch as private
from lightning_lowprec.products.coded_weight import CodedWeight, in_place_of, user_attributes

_aten: Any = torch.ops.aten
_ALIASES: Final = {_aten.detach.default, _aten.alias.default}
_COPIES: Final = {_aten.copy_.default, private.ATEN_FOREACH_COPY}
_CUTS: Final = {_aten.empty_like.default, _aten.new_zeros.default, _aten.clone.default}
"""With views, the operations by which FSDP2 makes shards. Later they give values."""


@final
class MsampWeight(CodedWeight):
    """Codes and scale, shown as a tensor of values of ``dtype``, which is that of the gradient too."""

    msamp_state: MsampWeightState

    @staticmethod
    def __new__(cls, state: MsampWeightState, dtype: torch.dtype = torch.float32) -> "MsampWeight":
        """Make a tensor without memory for values, shaped and strided like the codes."""
        weight = cls.showing(state.codes, dtype)
        weight.msamp_state = state
        return weight

    codes = property(lambda self: self.msamp_state.codes)
    scale = property(lambda self: self.msamp_state.scale)
    e4m3 = property(lambda self: self.msamp_state.e4m3)
    e4m3_scale = property(lambda self: self.msamp_state.e4m3_scale)

    def codes_and_scale(self) -> tuple[Tensor, Tensor]:
        """Return the codes for products, float16 or float8, and their scale."""
        return self.msamp_state.for_products()

    def decode(self) -> Tensor:
        """Return the values, (...) in the dtype that the weight shows."""
        return self.msamp_state.values().to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Keep codes for views, encode what is written, and let all else read the values."""
        if torch.is_inference_mode_enabled():  # shows operations that are made of others, such as aten.to.dtype
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if func.namespace == "c10d":
            raise RuntimeError(
                f"{func} got a weight that is kept as codes with a scale (MS-AMP), and would not reach the codes. Send"
                " state dicts, or keep the layer in high precision: `MSAMP(..., keep=[...])`."
            )
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def on_codes(cls, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep codes for views, and for what FSDP2 does to cut a weight."""
        if func in private.ENCODER_LAYER:  # autocast would cast inside this operation, and does not see a subclass
            values = private.tree_map_only(MsampWeight, MsampWeight.decode, args)
            dtype = values[0].dtype
            return func(*private.tree_map_only(Tensor, lambda t: t.to(dtype), values), **kwargs)
        weight = args[0]
        if not isinstance(weight, MsampWeight):
            return NotImplemented
        if func in _ALIASES:
            return MsampWeight(weight.msamp_state, weight.dtype)
        cuts = weight.msamp_state.cutting and func in _CUTS
        if cuts or (func.is_view and func is not _aten.view.dtype):
            return _view(func, args, {name: value for name, value in kwargs.items() if name != "dtype"})
        return NotImplemented

    @classmethod
    @torch.no_grad()
    def write(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Any]) -> Any:
        """Run an operation that writes to weights: on their values, which are encoded again."""
        _check_write(func, targets)
        if func is _aten.copy_.default and _copy_codes_(targets[0].msamp_state, args[1]):
            return targets[0]
        changed: dict[int, tuple[MsampWeightState, Tensor]] = {}

        def plain(weight: "MsampWeight") -> Tensor:
            if not any(weight is target for target in targets):
                return weight.decode()
            part = weight.msamp_state
            whole = part.whole or part
            if id(whole) not in changed:  # the memory of the values is laid out as that of the codes
                values = whole.codes.new_empty_strided(whole.codes.shape, whole.codes.stride(), dtype=torch.float32)
                changed[id(whole)] = whole, values.copy_(whole.values())
            offset = part.codes.storage_offset() - whole.codes.storage_offset()
            return changed[id(whole)][1].as_strided(part.codes.shape, part.codes.stride(), offset)

        arguments, options = private.tree_map_only(MsampWeight, plain, (args, kwargs))
        func(*arguments, **options)
        for state, values in changed.values():
            state.set_values_(values, refuse_loss=True)
        return private.returned_in_place(func, args, kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array, for loggers of histograms."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on a weight that requires grad. Use weight.detach().numpy() instead."
            )
        return self.decode().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as a nested list."""
        return self.decode().tolist()

    @property
    def data(self) -> Tensor:
        """The same codes for code that writes behind autograd's back."""
        return self.detach()

    @data.setter
    @torch.inference_mode(False)  # an optimizer writes to the codes later
    def data(self, values: Tensor) -> None:
        """Take the codes of ``values``, or fresh codes: the old ``data`` keep theirs, as those of any tensor do."""
        if values.shape != self.shape or values.device != self.device:
            raise RuntimeError(
                f"a weight of shape {tuple(self.shape)} on {self.device} that is kept as codes with a scale (MS-AMP)"
                f" got data of shape {tuple(values.shape)} on {values.device}; expected the same shape and device."
                " Move the layer with `layer.to(device)`. Keep the layer in high precision to change its shape:"
                " `MSAMP(..., keep=[...])`."
            )
        state = msamp_state_of(values)
        if state is None or not state.may_replace(self.msamp_state):
            fresh = MsampWeight(self.msamp_state.copied())
            fresh.copy_(values)
            state = fresh.msamp_state
        self.msamp_state = state

    # ---- FSDP2

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], object]:
        """Return the codes to send, for FSDP2."""
        codes, scale = self.codes_and_scale()
        return (codes.view(torch.uint8),), scale

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Return the whole weight, for FSDP2; later gathers fill the memory of the first gather."""
        if out is not None:
            return None
        (gathered,) = all_gather_outputs
        return MsampWeight(MsampWeightState(gathered.view(E4M3.dtype), metadata), param_dtype), (gathered,)

    # ---- compilers and copies

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        names = ["codes", "scale"] if self.e4m3 is None else ["codes", "scale", "e4m3", "e4m3_scale"]
        return names, self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], dtype: torch.dtype, size: object, stride: object) -> "MsampWeight":
        return MsampWeight(MsampWeightState(**inner), dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = in_place_of(self, MsampWeight(self.msamp_state.copied()))
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        """Return what pickle keeps: e4m3 as bytes, because pickle cannot read a storage of float8."""
        inner = {name: getattr(self, name) for name in self.__tensor_flatten__()[0]}
        if self.e4m3 is not None:
            inner["e4m3"] = self.e4m3.contiguous().view(torch.uint8)
        attributes = {**user_attributes(self), "_is_param": isinstance(self, nn.Parameter)}
        return _unpickled, (inner, self.dtype, self.requires_grad, attributes)

    def data_ptr(self) -> int:
        """Return the address of the codes."""
        return self.msamp_state.codes.data_ptr()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, scale={self.scale})"


# ---- operations


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a view operation on codes; the result remembers the whole weight, for writes."""
    state, dtype = args[0].msamp_state, args[0].dtype
    codes: Any = func(state.codes, *args[1:], **kwargs)
    e4m3: Any = None if state.e4m3 is None else func(state.e4m3, *args[1:], **kwargs)
    if isinstance(codes, Tensor):
        return MsampWeight(state.part(codes, e4m3), dtype)
    return [MsampWeight(state.part(*part), dtype) for part in zip(codes, e4m3 or [None] * len(codes), strict=True)]


def _check_write(func: Any, targets: Sequence[MsampWeight]) -> None:
    """Refuse writes to gathered weights, and updates of many weights at once by optimizers and averages."""
    shape = tuple(targets[0].shape)
    if any(target.codes.dtype == E4M3.dtype for target in targets):  # gathered
        raise RuntimeError(
            f"{func} would write to a gathered weight of shape {shape} (MS-AMP, FSDP2), which is freed after its layer"
            " ran. Write to the shards, between steps; or keep the layer in high precision: `MSAMP(..., keep=[...])`."
        )
    if func.name().startswith("aten::_foreach_") and func not in (*_COPIES, private.ATEN_FOREACH_ZERO):
        raise TypeError(
            f"{func} would update a weight of shape {shape} that is kept as codes with a scale (MS-AMP), as optimizers"
            " and averages do that do not know codes: every update would be rounded. Use `torch.optim.AdamW` under"
            " `precision='msamp-o2'` (or o1, o3), or `lightning_lowprec.msamp.ScaledAdamW`. To average models, average"
            " their state dicts. Or keep the layer in high precision: `MSAMP(..., keep=[...])`."
        )


def _copy_codes_(target: MsampWeightState, source: object) -> bool:
    """Copy codes and scales, if that is exact; return whether it was."""
    other = msamp_state_of(source)
    if other is None or target.codes.shape != other.codes.shape or (target.e4m3 is None) != (other.e4m3 is None):
        return False
    if target.scale is not other.scale and (target.whole is not None or target.shards is not None):
        return False  # a part of a weight has the scale of the whole
    target.copy_(other)
    return True


def _unpickled(inner: dict[str, Any], dtype: torch.dtype, trains: bool, attributes: dict[str, Any]) -> MsampWeight:
    weight = MsampWeight(MsampWeightState(**inner), dtype)
    if weight.e4m3 is not None:
        weight.msamp_state.e4m3 = weight.e4m3.view(E4M3.dtype)
    weight.__dict__.update(attributes)
    weight.requires_grad_(trains)
    return weight


# ---- the parameter: made from a plain one, moved, made plain again


@torch.inference_mode(False)  # an optimizer writes to the codes later
def scale_weight_(param: nn.Parameter, level: Level) -> MsampWeightState:
    """Make ``param`` hold codes, in place, and return its state, which is then at ``param.msamp_state``.

    ``param`` is float32, bfloat16 or float16, and finite; from then on it shows float32. The object stays.

    Raises:
        ValueError: an unknown level, or ``param`` holds codes already.
    """
    private.check(private.MSAMP)
    check_choice("level", level, LEVELS)
    if (present := msamp_state_of(param)) is not None:
        raise ValueError(f"the parameter of shape {tuple(param.shape)} holds {present.codes.dtype} codes already.")
    state = MsampWeightState.of(param.detach().float(), level)
    param.grad = None
    private.swap_data(param, in_place_of(param, MsampWeight(state)))
    return state


@torch.no_grad()
def revert_weight_(param: nn.Parameter) -> None:
    """Make a parameter of codes a plain one, in place: float32, with :func:`best_values_of`."""
    gradient, param.grad = param.grad, None
    private.swap_data(param, in_place_of(param, best_values_of(param)))
    drop(param)
    param.grad = gradient.decode() if isinstance(gradient, ScaledGradient) else gradient


@torch.inference_mode(False)
def move_(param: Tensor, device: torch.device) -> None:
    """Move a weight of codes and its gradient to ``device``; the object stays."""
    gradient, param.grad = param.grad, None
    private.swap_data(param, in_place_of(param, MsampWeight(required_state_of(param).copied(device))))
    if gradient is not None and device.type != "meta":
        param.grad = gradient.to(device)


# ---- codes and values of parameters, whole or sharded


def coded_weight(model: nn.Module) -> str | None:
    """Return the fqn of the first parameter of ``model`` that is kept as codes; None if there is none."""
    return next((fqn for fqn, p in model.named_parameters() if msamp_state_of(p) is not None), None)


def codes_of(param: Tensor) -> Tensor:
    """Return the codes of a weight, of this rank if it is sharded or gathered; any other tensor unchanged."""
    state = msamp_state_of(param)
    return param if state is None else state.codes


@torch.no_grad()
def values_of(param: Tensor) -> Tensor:
    """Return the exact values of a parameter of codes: (...) float32, sharded like the parameter."""
    return private.with_local_tensor(required_state_of(param).values(), param)


@torch.no_grad()
def best_values_of(param: Tensor) -> Tensor:
    """Return the most exact values of a parameter of codes that exist: (...) float32, sharded like the parameter.

    They are the values from before the encoding, if they are kept and nothing was written since, else the codes'.
    """
    state, before = required_state_of(param), raw(param)
    if before is not None and state.encodes(before := before.to(param.device).float()):
        return before
    return values_of(param)


@torch.no_grad()
def set_values_(param: Tensor, values: Tensor) -> None:
    """Give a parameter of codes other values: (...) any float, for example those of :func:`values_of`.

    A master that waits for such values takes their place. For a sharded parameter a collective: every rank calls it.
    """
    required_state_of(param).set_values_(private.local_tensor(values.detach()).float())
    private.increment_versions([param])
