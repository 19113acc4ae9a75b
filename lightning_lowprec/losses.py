"""The cross-entropy of a linear output head, without the whole matrix of logits.

    from lightning_lowprec.losses import linear_cross_entropy

    loss = linear_cross_entropy(hidden, self.lm_head.weight, targets)   # cross_entropy(self.lm_head(hidden), targets)

With a vocabulary of 128k, 8,192 tokens have logits of 2 GB in bf16; ``cross_entropy`` reads and writes them in float32
many times. This loss holds the logits of a part of the tokens and computes their gradients at once: three matrix
products, and nothing is computed twice. See :mod:`~lightning_lowprec.numerics.linear_cross_entropy`.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, Never, cast, final, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Partial

from lightning_lowprec.checks import check_choice
from lightning_lowprec.hardware import refusal
from lightning_lowprec.numerics import linear_cross_entropy as chunked
from lightning_lowprec.numerics.fp8_matrices import FastAccum
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.numerics.tensor_cores import UNITS, Emulation
from lightning_lowprec.other_stacks import unknown_option

_SPELLED: Final[dict[object, str]] = {False: "", True: "float32"}
"""Spellings of ``emulate`` beside the names of GPUs, for an operation that takes strings."""
Reduction = Literal["mean", "sum", "none"]
__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    fp8: bool = False,
    emulate: Emulation | None = None,
    rows: int | None = None,
    **left: Never,
) -> Tensor:
    """Return ``cross_entropy(linear(input, weight, bias).float(), target)``, some tokens at a time.

    The matrix products take the dtype of autocast, or of ``input`` without autocast, and round the logits to this
    dtype, as ``linear`` does. Everything else is float32, and so is the loss. The gradient of ``weight`` is summed in
    float32 and rounded once. With ``reduction="none"`` the backward pass computes the logits again.

    Args:
        input: hidden states, (..., K).
        weight: of the output head, (V, K). A ``DTensor`` is gathered, and its gradient averaged over its mesh, as FSDP
            does.
        target: classes, (...) int64.
        bias: (V,).
        reduction: ``"mean"`` over the targets that are not ignored, ``"sum"``, or ``"none"``: (...), with 0 for ignored
            targets.
        ignore_index: targets without a loss.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
        fp8: compute the three matrix products in FP8: ``input`` and ``weight`` in e4m3, each with the scale of its
            amax, and the gradient of the logits in e5m2. K must be a multiple of 16.
        emulate: multiply dequantised codes in float32 instead of calling FP8 kernels, or add up as a named GPU:
            ``"hopper"``, ``"ada"`` or ``"blackwell"``. None: in float32, on a CPU only.
        rows: tokens at a time; None chooses. The result differs by the order of float32 sums alone.

    Raises:
        ValueError: shapes, dtypes or options that do not fit.
        RuntimeError: the device has no FP8; a second backward pass; a gradient that is to be differentiated, or in
            forward mode.
    """
    for name in left:
        raise unknown_option("linear_cross_entropy", name, ())
    options = Options(reduction, ignore_index, label_smoothing, fp8, emulate, rows)
    return computed(input, weight, target, bias, options)


class Options(NamedTuple):
    """Options of :func:`linear_cross_entropy`, and which products in FP8 may add up with fewer bits than float32."""

    reduction: Reduction = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    fp8: bool = False
    emulate: Emulation | None = None
    rows: int | None = None
    fast_accum: FastAccum = "forward"


def computed(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options) -> Tensor:
    """Return :func:`linear_cross_entropy`."""
    reduction, ignore_index, label_smoothing, fp8, emulate, rows, fast_accum = options
    dtype = _checked(input, weight, target, bias, reduction, label_smoothing, fp8, rows)
    flat = input.reshape(-1, input.shape[-1]).to(dtype)
    terms = ignore_index, float(label_smoothing)
    if emulate is None:
        emulate = input.device.type == "cpu"
    check_choice("emulate", emulate, (True, False, *UNITS))
    settings = fp8, rows or 0, _SPELLED.get(emulate, emulate), fast_accum
    whole = _whole(weight), None if bias is None else _whole(bias)
    arguments = flat, *whole, target.reshape(-1), reduction, terms, settings
    losses: Tensor = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return losses.view(target.shape) if reduction == "none" else losses


@final
class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of (T, K) hidden states. All gradients but those of single losses are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        reduction: str,
        terms: tuple[int, float],
        settings: tuple[bool, int, str, str],
    ) -> Tensor:
        """Return the losses (T,), their sum or their mean, float32."""
        ctx.terms, ctx.settings, ctx.reduction, ctx.used = terms, settings, reduction, False
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        fp8, rows, *kernels = settings
        single = reduction == "none"
        wanted = [False] * 3 if single else list(ctx.needs_input_grad[:3])
        one = torch.ones((), device=hidden.device)
        count = (target != terms[0]).sum().float() if reduction == "mean" else one
        share = torch.where(count > 0, 1 / count, 0)
        after = share if fp8 else one
        compute = _computation()
        losses, *gradients = compute(hidden, weight, bias, fp8, rows, wanted, target, one, after, *terms, *kernels)
        if single:
            ctx.save_for_backward(hidden, weight, bias, target)
            return losses
        ctx.save_for_backward(*gradients, one if fp8 else share)  # FP8 products have multiplied by the share
        return losses.sum() / count

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradients by ``grad_output`` in float32; for single losses compute them."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy has no second gradient, and `create_graph=True` asks for one. Use"
                " `cross_entropy(linear(input, weight), target)` there."
            )
        grad_output = grad_output.float()
        if ctx.reduction == "none":
            hidden, weight, bias, target = ctx.saved_tensors
            top = grad_output.abs().amax() if len(grad_output) else grad_output.new_zeros(())
            factors = grad_output / torch.where(top > 0, top, 1)  # between -1 and 1, as small formats need it
            wanted = list(ctx.needs_input_grad[:3])
            one = torch.ones((), device=hidden.device)
            fp8, rows, *kernels = ctx.settings
            others = target, factors, one, *ctx.terms, *kernels
            _, *gradients = _computation()(hidden, weight, bias, fp8, rows, wanted, *others)
        else:
            if ctx.used:
                raise RuntimeError(
                    "linear_cross_entropy ran its backward pass before, which used its gradients up. Compute the loss"
                    " again, or use `reduction='none'`, which computes the gradients anew."
                )
            ctx.used = not torch.compiler.is_compiling()
            *gradients, share = ctx.saved_tensors
            top = grad_output * share
        top = top / chunked.gradient_scale(ctx.dtypes[0], fp8=ctx.settings[0])
        of_inputs = (
            _times(gradient, top, dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, ctx.needs_input_grad, strict=False)
        )
        return (*of_inputs, None, None, None, None)


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient * factor``, computed in float32 and rounded once; in the memory of ``gradient`` if it fits."""
    if gradient.dtype == dtype:
        return chunked.multiply_(gradient, factor)
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def _computation() -> Callable[..., list[Tensor]]:
    """Return the function that computes losses and gradients; a compiler sees one operation."""
    return torch.ops.lightning_lowprec.linear_cross_entropy if torch.compiler.is_compiling() else _run


def _run(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fp8: bool,
    rows: int,
    of: list[bool],
    target: Tensor,
    factors: Tensor,
    after: Tensor,
    ignore_index: int,
    label_smoothing: float,
    emulate: str,
    fast_accum: str,
) -> list[Tensor]:
    """Return losses and the gradients of hidden states, weight and bias; empty tensors for those not wanted."""
    arguments = hidden, weight, bias, target, factors, (ignore_index, label_smoothing), of, rows or None
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        if not len(hidden):
            return [torch.zeros_like(result) for result in _fake(hidden, weight, bias, fp8, rows, of)]
        if not fp8:
            return _listed(chunked.in_half(*arguments), hidden)
        emulation: Any = {spelling: value for value, spelling in _SPELLED.items()}.get(emulate, emulate)
        _check_device(hidden.device, emulation)
        return _listed(
            chunked.in_fp8(*arguments, after, emulate=emulation, fast_accum=cast(FastAccum, fast_accum)), hidden
        )


def _listed(results: chunked.Results, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if result is None else result for result in results]


def _fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, fp8: bool, rows: int, of: list[bool], *_: object
) -> list[Tensor]:
    return _listed(chunked.empty_results(hidden, weight, of, rows or None, fp8=fp8), hidden)


_OPERATION: Final = torch.library.custom_op("lightning_lowprec::linear_cross_entropy", _run, mutates_args=())
_OPERATION.register_fake(_fake)


@final
class _Gathered(torch.autograd.Function):
    """The whole of a parameter that a user's FSDP2 shards, or tensor parallelism cuts."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = parameter.device_mesh, parameter.placements
        whole: Tensor = parameter.full_tensor()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        everyone = [Partial()] * ctx.mesh.ndim
        total = DTensor.from_local(gradient.float() / ctx.mesh.size(), ctx.mesh, everyone, run_check=False)
        shard: Any = total.redistribute(placements=ctx.placements).to(gradient.dtype)
        return shard  # type: ignore[no-any-return]


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    whole: Tensor = _Gathered.apply(parameter)  # type: ignore[no-untyped-call]
    return whole


def _have_tangents(*tensors: Tensor) -> bool:
    duals = [forward_ad.unpack_dual(tensor) for tensor in tensors]  # type: ignore[no-untyped-call]
    return any(dual.tangent is not None for dual in duals)


@functools.cache
def _check_device(device: torch.device, emulate: Emulation) -> None:
    reason = None if emulate else refusal("fp8-head", device)
    if reason is not None:
        raise RuntimeError(f"`fp8=True` cannot run: {reason}. Leave it out, or emulate FP8, slowly, by `emulate=True`.")


def _checked(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    reduction: str,
    label_smoothing: float,
    fp8: bool,
    rows: int | None,
) -> torch.dtype:
    if isinstance(input, DTensor) or isinstance(target, DTensor):
        raise ValueError("`input` and `target` must be the tensors of this rank, got a DTensor; pass `.to_local()`.")
    if input.shape[-1:] != weight.shape[1:] or input.shape[:-1] != target.shape:
        raise ValueError(
            "`input` (..., K), `weight` (V, K) and `target` (...) do not fit: got"
            f" {tuple(input.shape)}, {tuple(weight.shape)} and {tuple(target.shape)}."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` must be (V,), here ({len(weight)},), got {tuple(bias.shape)}.")
    if target.dtype != torch.int64:
        raise ValueError(f"`target` must be int64, the indices of classes, got {target.dtype}.")
    check_choice("reduction", reduction, get_args(Reduction))
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing={label_smoothing!r}` is not valid; expected a number from 0 to 1.")
    if rows is not None and rows < 1:
        raise ValueError(f"`rows={rows!r}` is not valid; expected None or a number of tokens, 1 or more.")
    if fp8 and weight.shape[1] % ALIGNMENT:
        raise ValueError(
            f"`fp8=True` needs a multiple of {ALIGNMENT} hidden features, got {weight.shape[1]}; leave `fp8` out."
        )
    if not torch.compiler.is_compiling() and _have_tangents(input, weight):
        raise RuntimeError(
            "linear_cross_entropy has no derivative in forward mode (`torch.autograd.forward_ad`). Use"
            " `cross_entropy(linear(input, weight), target)` there."
        )
    device = input.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if input.dtype != weight.dtype:
        raise ValueError(
            f"`input` is {input.dtype} and `weight` {weight.dtype}; cast one of them, or use `torch.autocast`."
        )
    return input.dtype
