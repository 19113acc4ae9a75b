"""Let torch compute shapes and lifetimes of CUDA tensors on a machine without a GPU: private names of fake tensors.

torch's fake tensors have a shape, a dtype and a device, and no values. Two parts of torch's C++ code ask for more of a
fake CUDA tensor than a machine without a GPU can answer:

* autograd asks for the current stream of the tensor's device, and raises where no CUDA device exists;
* autocast takes part only where the device is CUDA, or XLA, which shares the lists of CUDA.

So C++ code sees the device XLA, for which autograd asks nothing, and Python code sees the device CUDA. Operations that
treat XLA in another way are called as CUDA would call them (attention, dropout, linear). C++ code finds the stream of a
device in a table of torch, which has no entry for XLA. The entry of the device "meta", which does nothing, takes this
place for as long as a context of :func:`fake_gpu` is open.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_lowprec.private.torch import SIMULATED_MEMORY, check

FAKE: Final = torch.device("cuda", 0)
"""The device, as Python code sees it."""
DispatchMode: Any = TorchDispatchMode
"""The base of classes that see every operation."""
_module: Any = importlib.import_module("torch._subclasses.fake_tensor")
NEEDS_VALUES: Final[tuple[type[Exception], ...]] = tuple(
    getattr(_module, name)
    for name in (
        "UnsupportedFakeTensorException",
        "DynamicOutputShapeException",
        "DataDependentOutputException",
        "UnsupportedOperatorException",
    )
    if hasattr(_module, name)
)
"""What operations raise that need values."""
_IN_CPP: Final = torch.device("xla", 0)
_ATTENTION: Final[Any] = torch.nn.functional.scaled_dot_product_attention
_DROPOUT: Final[Any] = torch.nn.functional.dropout
_LINEAR: Final[Any] = torch.nn.functional.linear
FLASH_BACKWARD: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_HALF: Final = (torch.float16, torch.bfloat16)
_LARGEST_HEAD: Final = 256
_ALIGNED: Final = 8  # elements: head dimensions are padded to multiples
_TABLE: Final = "_ZN3c104impl26device_guard_impl_registryE"
_LENGTH: Final = 15  # of the part of the table that is read: up to the device "meta"


@contextmanager
def fake_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Make fake CUDA tensors within the context, with autograd and autocast; nothing is computed.

    No other code of the process may train meanwhile.

    Args:
        capability: of the GPU that is simulated, such as ``(9, 0)``.

    Raises:
        ImportError: torch has moved a private name.
    """
    check(SIMULATED_MEMORY)
    importlib.import_module("torch._dynamo")  # compares signatures of what is replaced below, so it comes before
    module: Any = torch._subclasses.fake_tensor
    answers: Mapping[str, Any] = {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "simulated GPU",
        "current_device": lambda: FAKE.index,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(0, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    with ExitStack() as stack:
        stack.enter_context(_stream_of_xla())
        for name, answer in answers.items():
            stack.enter_context(_replaced(torch.cuda, name, answer))
        stack.enter_context(_replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(_replaced(module, "init_gpu_context", lambda device: None))
        handlers = {**module._DISPATCH_META_HANDLERS, torch.ops.prim.device.default: _device_of}
        stack.enter_context(_replaced(module, "_DISPATCH_META_HANDLERS", handlers))
        stack.enter_context(_replaced(module.FakeTensor, "__torch_dispatch__", _dispatch_of(module.FakeTensor)))
        stack.enter_context(_replaced(module.FakeTensor, "__new__", _new_of(module.FakeTensor)))
        stack.enter_context(_replaced(module.FakeTensor, "is_cuda", property(lambda t: t.device.type == "cuda")))
        stack.enter_context(_replaced(module.FakeTensor, "cuda", lambda t, *args, **kwargs: t.to(FAKE)))
        functional: Any = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensor
        stack.enter_context(_replaced(functional, "device", property(_python_device)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(module.FakeTensorMode())
        stack.enter_context(_Devices())  # type: ignore[no-untyped-call]
        for name, function in (
            ("scaled_dot_product_attention", _attention),
            ("dropout", _dropout),
            ("linear", _linear),
        ):
            stack.enter_context(_replaced(torch.nn.functional, name, function))
        yield


def is_fake(tensor: Any) -> bool:
    """Return whether ``tensor`` is a fake tensor on the simulated GPU."""
    module: Any = torch._subclasses.fake_tensor
    return isinstance(tensor, module.FakeTensor) and tensor.device.type == FAKE.type


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _device_of(args: Any) -> torch.device:
    """Return the device of a fake tensor as C++ code sees it."""
    fake = args[0]
    if fake.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return _IN_CPP if fake.fake_device.type == FAKE.type else fake.fake_device


def _python_device(tensor: Any) -> torch.device:
    own: torch.device = Tensor.device.__get__(tensor)
    return FAKE if own.type == _IN_CPP.type else own


def _dispatch_of(fake_tensor: Any) -> Any:
    own = fake_tensor.__torch_dispatch__

    def dispatch(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return _device_of(args)
        return own(func, types, args, kwargs or {})

    return classmethod(dispatch)


def _new_of(fake_tensor: Any) -> Any:
    own = fake_tensor.__new__

    def on_fake(value: Any) -> Any:
        return FAKE if isinstance(value, torch.device) and value.type == _IN_CPP.type else value

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return own(cls, *map(on_fake, args), **{name: on_fake(value) for name, value in kwargs.items()})

    return staticmethod(new)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give a module or class an attribute, which the owner may have, inherit, or not have."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def _stream_of_xla() -> Iterator[None]:
    """Let C++ code find a stream, which does nothing, for the device XLA; an entry that is there stays."""
    kinds: Any = torch._C._autograd.DeviceType
    xla, meta = int(kinds.XLA), int(kinds.Meta)
    folder = Path(torch.__file__).parent / "lib"
    libraries = [path for ending in ("so", "dylib") for path in folder.glob(f"libc10.{ending}")]
    try:
        table = (ctypes.c_void_p * _LENGTH).in_dll(ctypes.CDLL(str(libraries[0])), _TABLE)
    except (IndexError, ValueError, OSError) as error:
        raise ImportError(
            f"memory cannot be simulated with torch {torch.__version__} on this system: torch's table of devices was"
            " not found. Run the command on Linux or macOS."
        ) from error
    before = table[xla]
    if before is None:
        table[xla] = table[meta]
    try:
        yield
    finally:
        table[xla] = before


@final
class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turn the device that C++ code sees back into the simulated GPU, in operations that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and is_fake(args[0]):
            return _device_of(args)
        if func is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
            return _zero(args[0])
        if func in (torch.ops.aten.is_pinned.default, torch.ops.aten._pin_memory.default):
            return func is torch.ops.aten._pin_memory.default and torch.ops.aten.alias.default(args[0])
        device = kwargs.get("device")
        if device is not None and device.type in (_IN_CPP.type, FAKE.type):
            kwargs = {**kwargs, "device": FAKE}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            if func is torch.ops.aten._to_copy.default and _changes_nothing(args[0], kwargs):
                return torch.ops.aten.alias.default(args[0])  # C++ code took the devices for different ones
        return func(*args, **kwargs)


def _zero(tensor: Tensor) -> bool | int | float:
    """Return the value that a tensor without values shows to Python code, such as ``if found.any()``."""
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 0


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == FAKE.type


def _changes_nothing(tensor: Tensor, kwargs: Mapping[str, Any]) -> bool:
    return is_fake(tensor) and kwargs.get("dtype") in (None, tensor.dtype) and not kwargs.get("memory_format")


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = (attention if _on_gpu(query) else _ATTENTION)(query, *args, **kwargs)
    return out


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Keep a mask of one byte per value, as CUDA's kernel does."""
    if not (_on_gpu(input) and training and 0 < p < 1) or inplace:
        out: Tensor = _DROPOUT(input, p, training, inplace)
        return out
    return torch.native_dropout(input, p, True)[0]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Add the bias within the product, also over sequences."""
    if bias is None or input.dim() != 3 or not _on_gpu(input):
        out: Tensor = _LINEAR(input, weight, bias)
        return out
    rows: Tensor = _LINEAR(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


@contextmanager
def noting_resized(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note`` with every storage that is resized within the context."""
    own = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = own(storage, size)
        note(storage)
        return result

    with _replaced(torch.UntypedStorage, "resize_", resize):
        yield


# ---- attention, by CUDA's choice without cuDNN, which keeps what flash keeps


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention as ``scaled_dot_product_attention`` does: (B, H, T, K) and alike -> (B, H, T, V)."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    widths = {t.shape[-1] for t in (query, key, value)}
    arguments = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    plain = query.dim() == 4 and query.dtype in _HALF and attn_mask is None
    if plain and len(widths) == 1 and query.shape[-1] <= _LARGEST_HEAD:
        return _flash(query, key, value, arguments)
    refused = (attn_mask is not None and attn_mask.requires_grad) or query.shape[1] != key.shape[1]
    if query.dim() == 4 and query.dtype in (*_HALF, torch.float32) and not refused:
        return _efficient(query, key, value, attn_mask, arguments)
    out: Tensor = _ATTENTION(query, key, value, attn_mask=attn_mask, enable_gqa=enable_gqa, **arguments)
    return out


def _flash(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]) -> Tensor:
    width = query.shape[-1]
    more = -width % _ALIGNED
    if more:
        query, key, value = (torch.nn.functional.pad(t, (0, more)) for t in (query, key, value))
        arguments = {**arguments, "scale": arguments["scale"] or width**-0.5}
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **arguments)[0]
    return out[..., :width] if more else out


def _efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, arguments: dict[str, Any]) -> Tensor:
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(mask, 0)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    train = any(t.requires_grad for t in (query, key, value))
    made = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, train, **arguments)
    out: Tensor = made[0]
    return out
