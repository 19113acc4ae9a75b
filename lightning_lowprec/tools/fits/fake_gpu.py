"""Let torch compute shapes and lifetimes of CUDA tensors on a machine without a GPU: private names of fake tensors.

torch's fake tensors have a shape, a dtype and a device, and no values. Two parts of torch's C++ code ask for more:
autograd asks for the current stream of the tensor's device, and raises where no CUDA device exists; autocast takes part
only where the device is CUDA. So Python code sees the device CUDA, and C++ code the device "lazy", whose stream does
nothing. Autocast for CUDA is done in Python, by torch's lists. Attention is that of CUDA.

A compiler keeps less for the backward than eager code: torch's partitioner decides which values are kept and which are
computed again. For compiled modules the partitioner decides here too, and no kernel is compiled; the two graphs then
run on fake tensors. A value of an element-wise operation has no memory where only such operations and reductions read
it: a compiler computes the value as it reads.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeGuard, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_lowprec.extras import missing, replaced
from lightning_lowprec.private.torch import tensors_of, tree_map_only

NAMES: Final = (
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor._DISPATCH_META_HANDLERS",
    "torch._subclasses.fake_tensor.init_gpu_context",
    "torch._C.DispatchKey.AutocastCUDA",
    "torch._C._EnablePythonDispatcher",
    "torch._C._ensureCUDADeviceGuardSet",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._dispatch_get_registrations_for_dispatch_key",
    "torch.ops.aten.mm.default.py_kernels",
    "torch.ops.aten.mm.default._dispatch_cache",
    "torch.cuda.amp.common.amp_definitely_not_available",
    "torch.ops.prim.device.default",
    "torch.ops.aten.view.default.is_view",
    "torch.ops.aten._local_scalar_dense.default",
    "torch.ops.aten._scaled_dot_product_flash_attention.default",
    "torch.ops.aten._scaled_dot_product_efficient_attention.default",
    "torch._functorch.aot_autograd.aot_function",
    "torch._functorch.partitioners.min_cut_rematerialization_partition",
    "torch._inductor.decomposition.select_decomp_table",
    "torch.nn.Module._call_impl",
    "torch.nn.Module()._compiled_call_impl",
    "torch.nn.utils.stateless._reparametrize_module",
    "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
)
"""Private names of torch that a simulation needs. Training needs none of them, so they are not in ``private/``."""
FAKE: Final = torch.device("cuda", 0)  # as Python code sees the device
DispatchMode: Any = TorchDispatchMode
"""The base of classes that see every operation."""
_module: Any = importlib.import_module("torch._subclasses.fake_tensor")
_IN_CPP: Final = torch.device("lazy", 0)
_ATTENTION: Final[Any] = torch.nn.functional.scaled_dot_product_attention
_aten: Any = torch.ops.aten
_IN_HALF: Final = {
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linalg_multi_dot", "linalg_vecdot",
    "linear", "matmul", "mm", "mv", "prelu", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "cudnn_convolution",
    "cudnn_convolution_transpose", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell",
    "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
}  # fmt: skip
"""Operations that autocast runs in half precision."""
_IN_WIDEST: Final = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot",
    "vdot",
}  # fmt: skip
"""Operations that autocast runs in the widest dtype of their arguments; all others that it knows run in float32."""


@contextmanager
def fake_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """Make fake CUDA tensors within the context, with autograd and autocast; nothing is computed.

    No other code of the process may train meanwhile.
    """
    if lost := missing(NAMES):
        raise ImportError(
            f"torch {torch.__version__} no longer has {', '.join(lost)}, which the simulation of a GPU needs. Install a"
            " torch that this version of lightning_lowprec supports."
        )
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # CUDA's build of torch asks its driver for the device otherwise
    importlib.import_module("torch._dynamo")  # compares signatures of what is replaced below, so it comes before
    answers: Mapping[str, object] = {
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
        for name, answer in answers.items():
            stack.enter_context(replaced(torch.cuda, name, answer))
        stack.enter_context(replaced(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        stack.enter_context(replaced(_module, "init_gpu_context", lambda device: None))
        # dynamo's record of what it compiled asks a driver for its version, and logs a traceback where there is none
        stack.enter_context(replaced(logging.getLogger("torch._dynamo.metrics_context"), "disabled", True))
        handlers = {**_module._DISPATCH_META_HANDLERS, torch.ops.prim.device.default: _device_of}
        stack.enter_context(replaced(_module, "_DISPATCH_META_HANDLERS", handlers))
        stack.enter_context(replaced(_module.FakeTensor, "__torch_dispatch__", _dispatch_of(_module.FakeTensor)))
        stack.enter_context(replaced(_module.FakeTensor, "__new__", _new_of(_module.FakeTensor)))
        stack.enter_context(replaced(_module.FakeTensor, "is_cuda", property(lambda t: t.device.type == "cuda")))
        stack.enter_context(replaced(_module.FakeTensor, "cuda", lambda t, *args, **kwargs: t.to(FAKE)))
        functional: Any = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensor
        stack.enter_context(replaced(functional, "device", property(_python_device)))
        stack.enter_context(_module.FakeTensorMode())
        stack.enter_context(_Devices())  # type: ignore[no-untyped-call]
        stack.enter_context(replaced(torch.nn.functional, "scaled_dot_product_attention", attention))
        stack.enter_context(_autocast())
        yield


def is_fake(tensor: object) -> TypeGuard[Tensor]:
    """Return whether ``tensor`` is a fake tensor on the simulated GPU."""
    return isinstance(tensor, _module.FakeTensor) and tensor.device.type == FAKE.type


def _device_of(args: Any) -> torch.device:
    """Return the device of a fake tensor as C++ code sees it."""
    fake = args[0]
    if fake.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    return _IN_CPP if fake.fake_device.type == FAKE.type else fake.fake_device


def _python_device(tensor: object) -> torch.device:
    own: torch.device = Tensor.device.__get__(tensor)
    return FAKE if own.type == _IN_CPP.type else own


def _dispatch_of(fake_tensor: Any) -> Any:
    own = fake_tensor.__torch_dispatch__

    def dispatch(cls: type, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        if func is torch.ops.prim.device.default:
            return _device_of(args)
        return own(func, types, args, kwargs or {})

    return classmethod(dispatch)


def _new_of(fake_tensor: Any) -> Any:
    own = fake_tensor.__new__

    def on_fake(value: object) -> object:
        return FAKE if isinstance(value, torch.device) and value.type == _IN_CPP.type else value

    def new(cls: type, *args: object, **kwargs: object) -> object:
        return own(cls, *map(on_fake, args), **{name: on_fake(value) for name, value in kwargs.items()})

    return staticmethod(new)


@contextmanager
def _autocast() -> Iterator[None]:
    """Let autocast for CUDA cast the arguments of its operations, in Python."""
    key = torch._C.DispatchKey.AutocastCUDA
    operations = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(key.name):
        library, _, qualified = name.partition("::")
        packet, _, overload = qualified.partition(".")
        operation: Any = getattr(getattr(getattr(torch.ops, library), packet), overload or "default")
        operation.py_kernels[key] = partial(_with_casts, operation, packet)
        operation._dispatch_cache.clear()
        operations.append(operation)
    try:
        with torch._C._EnablePythonDispatcher():
            yield
    finally:
        for operation in operations:
            del operation.py_kernels[key]
            operation._dispatch_cache.clear()


def _with_casts(operation: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    tensors = [value for value in tensors_of((args, kwargs)) if _is_cast(value)]
    arguments = [argument.name for argument in operation._schema.arguments]
    half = torch.get_autocast_dtype(FAKE.type)
    all_half = name in _IN_WIDEST and not any(tensor.dtype == torch.float32 for tensor in tensors)
    dtype = half if name in _IN_HALF or all_half else torch.float32
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)):
        if "dtype" in arguments:  # of the result: nothing is cast
            position = arguments.index("dtype")
            if tensors and kwargs.get("dtype") is None and args[position : position + 1] in ((), (None,)):
                return operation(*args[:position], **{**kwargs, "dtype": dtype})
            return operation(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if _is_cast(t) else t, (args, kwargs))
        return operation(*args, **kwargs)


def _is_cast(tensor: Tensor) -> bool:
    return is_fake(tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


@final
class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Turn the device that C++ code sees back into the simulated GPU, in operations that make tensors."""

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and is_fake(args[0]):
            return _device_of(args)
        if func is _aten._local_scalar_dense.default and is_fake(args[0]):
            number = 0.0 if args[0].is_floating_point() else 0
            return args[0].dtype != torch.bool and number  # what Python code sees, such as ``if overflow.any()``
        if func in (_aten.is_pinned.default, _aten._pin_memory.default):
            return func is _aten._pin_memory.default and _aten.alias.default(args[0])
        device = kwargs.get("device")
        if device is not None and device.type in (_IN_CPP.type, FAKE.type):
            kwargs = {**kwargs, "device": FAKE}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            same = func is _aten._to_copy.default and is_fake(args[0]) and not kwargs.get("memory_format")
            if same and kwargs.get("dtype") in (None, args[0].dtype):
                return _aten.alias.default(args[0])  # C++ code took the devices for different ones
        return func(*args, **kwargs)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: object, **options: object
) -> Any:
    """Return attention by one kernel where CUDA has one, else by products: (B, H, T, K) and alike -> (B, H, T, V).

    The rest of the arguments is that of ``scaled_dot_product_attention``. A kernel keeps no scores.
    """
    on_gpu, grouped = query.device.type == FAKE.type, options.pop("enable_gqa", False)
    if on_gpu and torch.is_autocast_enabled(FAKE.type):
        dtype = torch.get_autocast_dtype(FAKE.type)
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    flash = attn_mask is None and query.shape[-1] == value.shape[-1]
    has_kernel = (flash and query.dtype.itemsize == 2) or not (grouped or getattr(attn_mask, "requires_grad", False))
    if not on_gpu or query.dim() != 4 or not has_kernel:
        return _ATTENTION(query, key, value, attn_mask, *args, enable_gqa=grouped, **options)
    if flash:  # what flash attention has no kernel for, memory-efficient attention keeps alike
        return _aten._scaled_dot_product_flash_attention(query, key, value, *args, **options)[0]
    mask = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, *args, **options)[0]


# ---- compiled modules

Pause = Callable[[], AbstractContextManager[None]]
_REDUCTIONS: Final = (_aten.amax, _aten.amin, _aten.any, _aten.max, _aten.mean, _aten.sum, _aten.var_mean)


@contextmanager
def compiling_on_fakes(pause: Pause) -> Iterator[None]:
    """Let ``torch.compile`` and ``module.compile()`` make graphs of modules for fake tensors within the context.

    What is allocated within ``pause``, while a graph is made, does not count.
    """
    graphs: dict[str, Callable[..., object]] = {}

    def compile(model: Any = None, **options: object) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        module = getattr(model, "__self__", model)
        if not isinstance(module, nn.Module):
            return model  # a function of a few operations: nothing is kept for a backward

        def pure(weights: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
            reparametrize: Any = torch.nn.utils.stateless._reparametrize_module
            with reparametrize(module, weights):
                return model(*args, **kwargs)

        def call(*args: object, **kwargs: object) -> object:
            """Run the graphs of the first module that was like this one, and called like it."""
            weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            modes = torch.is_grad_enabled(), torch.is_autocast_enabled(FAKE.type), module.training
            shown = tree_map_only(Tensor, lambda t: (t.shape, t.dtype, t.requires_grad), (weights, args, kwargs))
            key = repr((type(module), modes, shown))
            if key not in graphs:
                graphs[key] = _graphs(pure, len(weights), pause)
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)  # for a checkpoint around
                with pause(), hooks, _as_compiling() as checkpoints:
                    graphs[key](weights, args, kwargs)
                if checkpoints:  # within the module, which a compiler also resolves
                    graphs[key] = partial(checkpoint, graphs[key], use_reentrant=False)
            return graphs[key](weights, args, kwargs)

        return call

    with replaced(torch, "compile", compile):
        yield


def _graphs(function: Callable[..., object], weights: int, pause: Pause) -> Callable[..., object]:
    """Return the forward and the backward of a function, whose first tensors are weights, as a compiler cuts them."""
    return importlib.import_module("torch._functorch.aot_autograd").aot_function(  # type: ignore[no-any-return]
        function,
        fw_compiler=lambda graph, example: lambda *values: _Fusing(graph, pause).run(*values),
        partition_fn=partial(_cut, weights),
        decompositions=importlib.import_module("torch._inductor.decomposition").select_decomp_table(),
    )


def _cut(weights: int, joint: Any, inputs: object, **known: object) -> Any:
    """Cut a graph as torch's compiler does, which sees through aliases and keeps its first inputs, weights, anyway."""
    for node in joint.graph.find_nodes(op="call_function", target=_aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        joint.graph.erase_node(node)
    cut = importlib.import_module("torch._functorch.partitioners").min_cut_rematerialization_partition
    return cut(joint, inputs, **{**known, "static_lifetime_input_indices": list(range(weights))})


@contextmanager
def _as_compiling() -> Iterator[list[bool]]:
    """Let code see a compiler, and no checkpoint; return a list with an entry per checkpoint."""
    module: Any = importlib.import_module("torch.utils.checkpoint")
    checkpoints: list[bool] = []

    def without(*args: object, **kwargs: object) -> Iterator[None]:
        checkpoints.append(True)
        yield

    with (
        replaced(torch.compiler, "is_compiling", lambda: True),
        replaced(module, "_checkpoint_without_reentrant_generator", without),
    ):
        yield checkpoints


@final
class _Fusing(torch.fx.Interpreter):
    """Run a graph, and count no value that a kernel of several operations never writes to memory."""

    def __init__(self, graph: torch.fx.GraphModule, pause: Pause) -> None:
        super().__init__(graph)
        self._pause = pause

    def run_node(self, n: torch.fx.Node) -> object:
        """Run an operation."""
        with self._pause() if _is_in_a_kernel(n) else nullcontext():
            return super().run_node(n)


def _is_in_a_kernel(node: torch.fx.Node) -> bool:
    """Return whether only kernels that a compiler makes read a value, behind views too, and compute it as they read."""
    return _kind(node) in ("pointwise", "view") and all(
        _is_in_a_kernel(user) if _kind(user) == "view" else _kind(user) for user in node.users
    )


def _kind(node: torch.fx.Node) -> str | None:
    if getattr(node.target, "overloadpacket", None) in _REDUCTIONS:
        return "reduction"
    pointwise = "pointwise" if torch.Tag.pointwise in getattr(node.target, "tags", ()) else None
    return "view" if getattr(node.target, "is_view", False) else pointwise


def compute_again(module: nn.Module) -> None:
    """Compute a module, or what was compiled of it, again in the backward; in place."""
    call: Any = module._compiled_call_impl or module._call_impl
    module._compiled_call_impl = partial(checkpoint, call, use_reentrant=False)
