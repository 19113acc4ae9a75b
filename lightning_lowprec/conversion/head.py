"""Replace the output head and the loss of a causal model of ``transformers``, in place.

    model(input_ids, labels=labels)             the model's own forward, unchanged
      |   self.lm_head(hidden)                  LossHead: in training it returns LazyLogits of the hidden states
      |   self.loss_function(logits, labels)    _causal_loss: finds LazyLogits, calls LossHead with the labels
      |     LossHead                            losses.linear_cross_entropy(hidden, weight, labels)
      v
    loss, logits                                the logits are computed if anyone reads them

LazyLogits are a Tensor without memory, of shape, dtype and device of the logits. Every operation on them runs on the
logits, which the head computes then. If a forward reads its logits before the loss (scales or caps them), the loss is
the model's own, from these logits: right and slower, with one warning.

The class of the head changes, so that the layer, its weight, ties and names stay. The weight is read inside of the
layer's own forward, where FSDP2 has gathered it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.losses import Options, computed
from lightning_lowprec.messages import warn
from lightning_lowprec.numerics.fp8_matrices import FastAccum
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.private import transformers
from lightning_lowprec.private.torch import version_of

HeadKind = Literal["bf16", "chunked", "fp8", "fp32"]
_IGNORED: Final = -100
MANY: Final = 32_000
"""Logits per token from which on :func:`advice` is given."""
WAY_OUT: Final = (
    "Leave `head` out, or compute the loss in your model by `lightning_lowprec.losses.linear_cross_entropy(hidden,"
    " lm_head.weight, targets)`"
)
NOT_USED: Final = (
    "`head={!r}` has no effect on this forward: its logits were read before a loss was computed from labels, so all of"
    " them were computed. This is right and slower. Pass `labels=...` to a model that does not compute with its logits,"
    " or compute the loss by `lightning_lowprec.losses.linear_cross_entropy`."
)
TOO_LATE: Final = (
    "These logits were not read before the weight of the head changed, so their values are gone. Read or detach them in"
    " the step that computes them, before the optimizer runs; or leave `head` out."
)
Task = Literal["logits"] | tuple[Tensor, dict[str, Any]] | None
"""To compute logits, or a loss from this target and these options; None: the mode of the head decides."""


@final
class LossHead(nn.Linear):
    """A Linear that computes the loss of its model from hidden states, some tokens at a time."""

    kind: HeadKind
    options: Options
    has_warned: bool

    def forward(self, input: Tensor, task: Task = None) -> Tensor:
        """[*, K] -> [*, V]; in training without a task LazyLogits, with the target of a loss the loss."""
        if self.kind != "fp32":
            return self._compute(input, task)
        with torch.autocast(input.device.type, enabled=False):
            return self._compute(input.float(), task)

    def _compute(self, input: Tensor, task: Task) -> Tensor:
        if task is None and self.training and torch.is_grad_enabled():
            device = input.device.type
            autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            return _lazy(self, input, autocast, autocast or input.dtype)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kind == "fp32":
            weight, bias = weight.float(), None if bias is None else bias.float()
        if not isinstance(task, tuple):
            return F.linear(input, weight, bias)
        target, terms = task
        return computed(input.reshape(-1, input.shape[-1]), weight, target, bias, self.options._replace(**terms))


def _causal_loss(
    head: LossHead,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Return the mean loss over tokens that are not ignored, or their sum over ``num_items_in_batch``.

    The loss of logits that have been read, and in evaluation, is that of ``transformers``.
    """
    if not isinstance(logits, LazyLogits) or logits.computed is not None:
        rest = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **options}
        return transformers.causal_loss(values_of(logits), labels, vocab_size, shift_labels=shift_labels, **rest)
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits.has_loss = True
    target = shift_labels.reshape(-1).to(logits.hidden.device)
    terms = {"reduction": "mean" if num_items_in_batch is None else "sum", "ignore_index": ignore_index}
    loss: Tensor = head(logits.hidden, task=(target, terms))
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def replace_heads(model: nn.Module, kind: HeadKind, emulate: Emulation | None, fast_accum: FastAccum) -> list[str]:
    """Replace heads and losses of the causal models in ``model``, in place; return the fqns of these models."""
    models = causal_models(model)
    for fqn, causal, head in models:
        if kind == "fp8" and head.in_features % ALIGNMENT:
            raise ValueError(
                f"`head='fp8'` needs a multiple of {ALIGNMENT} hidden features, and the head of {_name(fqn, causal)}"
                f" has {head.in_features}; use `head='chunked'`."
            )
    options = Options(fp8=kind == "fp8", emulate=emulate, fast_accum=fast_accum)
    for _, causal, head in models:
        in_place.become(head, LossHead, {"kind": kind, "options": options, "has_warned": False})
        transformers.set_loss(causal, partial(_causal_loss, head))  # type: ignore[arg-type]
    return [fqn for fqn, *_ in models]


def restore_heads(model: nn.Module) -> None:
    """Undo :func:`replace_heads`, in place."""
    for module in model.modules():
        if getattr(transformers.loss_of(module), "func", None) is _causal_loss:
            transformers.set_loss(module, None)
        if isinstance(module, LossHead):
            in_place.revert(module)


# ---- logits that nobody has computed yet


@final
class LazyLogits(Tensor):
    """What a head returns in training in place of logits: whatever reads them gets the tensor, computed then.

    The tensor is the one that the Linear would have returned, with its graph. It can be read until the backward pass
    under FSDP2, which frees the weight then, and until the step of the optimizer elsewhere. Until then
    ``requires_grad`` says False, so that FSDP2 and Fabric do not hook a tensor that is not in the graph. ``hidden``,
    (..., K), is the input of the head.
    """

    head: LossHead
    hidden: Tensor
    autocast: torch.dtype | None
    weight: tuple[Tensor, int | None]
    """The weight and how often it had been written when the logits came, which a compiler does not know."""
    has_loss: bool
    computed: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.computed is None:
            if func == _DEVICE:
                return first.hidden.device
            if func == _REQUIRES_GRAD:
                return False
            if func in _FACTS:
                return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if func is Tensor.contiguous:
                return first
            if func is Tensor.float:
                return _again(first, torch.float32)
            if func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
                return _again(first, args[1])
        return func(*map(values_of, args), **{name: values_of(value) for name, value in (kwargs or {}).items()})


_DEVICE, _REQUIRES_GRAD = (getattr(Tensor, name).__get__ for name in ("device", "requires_grad"))
_FACTS: Final = (
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point),
)
"""What is known of logits that are not computed."""


def _lazy(head: LossHead, hidden: Tensor, autocast: torch.dtype | None, dtype: torch.dtype) -> LazyLogits:
    shape = (*hidden.shape[:-1], head.out_features)
    # a custom autograd Function reads the logits outside of the graph: its gradient raises on "meta", and is not lost
    is_compiling = torch.compiler.is_compiling()
    needs_grad = dtype.is_floating_point and not is_compiling
    logits = torch.empty(shape, dtype=dtype, device="meta", requires_grad=needs_grad).as_subclass(LazyLogits)
    logits.head, logits.hidden, logits.autocast = head, hidden, autocast
    logits.weight = head.weight, None if is_compiling else version_of(head.weight)
    logits.has_loss, logits.computed = False, None
    return logits


def _again(logits: LazyLogits, dtype: torch.dtype) -> LazyLogits:
    """Return other logits of the same hidden states, not computed."""
    other = _lazy(logits.head, logits.hidden, logits.autocast, dtype)
    other.weight, other.has_loss = logits.weight, logits.has_loss
    return other


def values_of(value: Any) -> Any:
    """Return the logits that a value, or its items, stand for; other values as they are."""
    if isinstance(value, list | tuple):
        return type(value)(map(values_of, value))
    if not isinstance(value, LazyLogits):
        return value
    head, hidden = value.head, value.hidden
    if value.computed is None:
        weight, version = value.weight
        if version is not None and head.weight is weight and version_of(weight) != version:
            raise RuntimeError(TOO_LATE)
        if not (value.has_loss or head.has_warned or torch.compiler.is_compiling()):
            head.has_warned = True
            warn(NOT_USED.format(head.kind), stacklevel=3)
        autocast = torch.autocast(hidden.device.type, dtype=value.autocast, enabled=value.autocast is not None)
        with autocast, torch.enable_grad():  # the next reader may want the graph
            value.computed = head(hidden, task="logits").to(value.dtype)
    return value.computed


# ---- which models are recognised


def causal_models(model: nn.Module) -> list[tuple[str, nn.Module, nn.Linear]]:
    """Return the fqn of every causal model of ``transformers`` in ``model``, the causal model, and its head."""
    models = list(_heads(model))
    for fqn, module, head in models:
        if (reason := unrecognised(module, head)) is not None:
            raise ValueError(f"`head` cannot replace the loss of {_name(fqn, module)}: {reason}. {WAY_OUT}.")
    if not models:
        raise ValueError(
            f"`head` knows the heads and losses of causal models of `transformers`, and {type(model).__name__} holds"
            f" none. {WAY_OUT}."
        )
    return models


def advice(model: nn.Module) -> list[str]:
    """Return a sentence about each causal model that could do without so many logits that they cost memory and time."""
    return [
        f"the loss of {_name(fqn, module)} makes {head.out_features:,} logits per token, in float32 too."
        f" `head='chunked'` computes the same loss without them"
        for fqn, module, head in _heads(model)
        if isinstance(head, nn.Linear) and head.out_features >= MANY and unrecognised(module, head) is None
    ]


def _heads(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    heads: set[int] = set()
    for fqn, module in model.named_modules():
        head = module.get_output_embeddings() if transformers.is_model(module) else None
        if head is not None and id(head) not in heads:
            heads.add(id(head))
            yield fqn, module, head


def _name(fqn: str, module: nn.Module) -> str:
    return f"{type(module).__name__}{f' ({fqn!r})' if fqn else ''}"


def unrecognised(model: object, head: nn.Module) -> str | None:
    """Return why the head and the loss of ``model`` are not recognised exactly, or None if they are."""
    if getattr(head, "own_class", type(head)) is not nn.Linear:
        return f"its head is no Linear but a {type(head).__name__}"
    if "forward" in vars(head):
        return "the forward of its head is replaced on the instance"
    if any(value for key, value in vars(head).items() if key.endswith("_hooks") and "state_dict" not in key):
        return "its head has hooks, which would not see logits"
    if "weight" not in head._parameters:
        return "the weight of its head is computed at each forward"
    if not transformers.has_causal_loss(model):
        return "its loss is not that of causal language models of `transformers`"
    return None
