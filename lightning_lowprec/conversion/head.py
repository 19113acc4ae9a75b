"""Replace the output head and the loss of a causal model of ``transformers``, in place.

    model(input_ids, labels=labels)             the model's own forward, unchanged
      |   self.lm_head(hidden)                  LossHead: in training it returns LazyLogits(hidden)
      |   self.loss_function(logits, labels)    CausalLoss: finds LazyLogits, calls LossHead with the labels
      |     LossHead                            losses.linear_cross_entropy(hidden, weight, labels)
      v
    loss, logits                                the logits are computed if anyone reads them

The class of the head changes, so that the layer, its weight, ties and names stay. The weight is read inside of the
layer's own forward, where FSDP2 has gathered it.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.head_recognition import WAY_OUT, causal_models
from lightning_lowprec.conversion.plain_first import RefusedQConfig
from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.private import transformers

HeadKind = Literal["bf16", "chunked", "fp8", "fp32"]
_IGNORED: Final = -100
_OPERATORS: Final = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "getitem", "setitem"),
)
NOT_USED: Final = (
    "`head={!r}` has no effect on this forward: its logits were read before a loss was computed from labels, so all of"
    " them were computed. Pass `labels=...` to the model, or compute the loss by"
    " `lightning_lowprec.losses.linear_cross_entropy`."
)


@dataclass(frozen=True)
class _Labels:
    """The task of a head to compute a loss."""

    target: Tensor
    reduction: Literal["mean", "sum"]
    ignore_index: int


@final
class LossHead(nn.Linear):
    """A Linear that computes the loss of its model from hidden states, some tokens at a time."""

    kind: HeadKind
    emulate: bool | None
    qconfig = RefusedQConfig()

    def forward(self, input: Tensor, task: Literal["logits"] | _Labels | None = None) -> Any:
        """[*, K] -> [*, V]; in training without a task LazyLogits, with labels the loss."""
        if self.kind != "fp32":
            return self._compute(input, task)
        with torch.autocast(input.device.type, enabled=False):
            return self._compute(input.float(), task)

    def _compute(self, input: Tensor, task: Literal["logits"] | _Labels | None) -> Any:
        if task is None and self.training and torch.is_grad_enabled():
            return LazyLogits(self, input, self.kind)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kind == "fp32":
            weight, bias = weight.float(), None if bias is None else bias.float()
        if not isinstance(task, _Labels):
            return F.linear(input, weight, bias)
        return linear_cross_entropy(
            input.reshape(-1, input.shape[-1]),
            weight,
            task.target,
            bias=bias,
            reduction=task.reduction,
            ignore_index=task.ignore_index,
            fp8=self.kind == "fp8",
            emulate=self.emulate,
        )


@final
class CausalLoss:
    """The loss of causal language models, from the hidden states that :class:`LazyLogits` hold.

    Args:
        head: the head of the model; in evaluation, the loss is that of ``transformers``.
    """

    def __init__(self, head: LossHead) -> None:
        self.head = head

    def __call__(
        self,
        logits: Any,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = _IGNORED,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the mean loss over tokens that are not ignored, or their sum over ``num_items_in_batch``."""
        if not isinstance(logits, LazyLogits):
            if self.head.training and logits.requires_grad:
                raise RuntimeError(
                    f"`head={self.head.kind!r}`: the model has read its logits before it asked for the loss. {WAY_OUT}."
                )
            rest = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **options}
            return transformers.causal_loss(logits, labels, vocab_size, shift_labels=shift_labels, **rest)
        if shift_labels is None:
            assert labels is not None
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1).to(logits.device)
        logits.has_loss = True
        reduction: Literal["mean", "sum"] = "mean" if num_items_in_batch is None else "sum"
        loss: Tensor = self.head(logits.hidden, task=_Labels(target, reduction, ignore_index))
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def replace_heads(model: nn.Module, kind: HeadKind, *, emulate: bool | None) -> list[str]:
    """Replace heads and losses of the causal models in ``model``, in place; return the fqns of these models."""
    models = list(causal_models(model))
    for fqn, causal, head in models:
        if kind == "fp8" and head.in_features % ALIGNMENT:
            raise ValueError(
                f"`head='fp8'` needs a multiple of {ALIGNMENT} hidden features, and the head of"
                f" {type(causal).__name__}{f' ({fqn!r})' if fqn else ''} has {head.in_features}; use `head='chunked'`."
            )
    for _, causal, head in models:
        in_place.become(head, LossHead, {"kind": kind, "emulate": emulate})
        transformers.set_loss(causal, CausalLoss(head))  # type: ignore[arg-type]
    return [fqn for fqn, *_ in models]


def restore_heads(model: nn.Module) -> None:
    """Undo :func:`replace_heads`, in place."""
    for module in model.modules():
        if isinstance(transformers.loss_of(module), CausalLoss):
            transformers.set_loss(module, None)
        if isinstance(module, LossHead):
            in_place.revert(module)


# ---- logits that nobody has computed yet


@final
class LazyLogits:
    """What a head returns in training in place of logits: whatever reads them gets the tensor, computed then.

    The tensor is the one that the Linear would have returned, with its graph. It can be read until the backward pass
    under FSDP2, which frees the weight then, and at any time elsewhere.

    Args:
        head: the layer; called with ``task="logits"`` it computes logits.
        hidden: (..., K), the input of the layer.
        option: the option of the plugin, for a warning.
    """

    def __init__(self, head: nn.Module, hidden: Tensor, option: str) -> None:
        self.head = head
        self.hidden = hidden
        self.option = option
        self.has_loss = False
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._cast_to: torch.dtype | None = None
        self._computed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self.hidden.shape[:-1], int(self.head.out_features)))  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return self._cast_to or self._autocast or self.hidden.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.hidden.device

    def is_floating_point(self) -> bool:
        """Return True."""
        return True

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return logits that will be cast when they are computed, for a dtype; else what the tensor returns."""
        if self._computed is not None or kwargs or len(args) != 1 or not isinstance(args[0], torch.dtype):
            return self.tensor().to(*args, **kwargs)
        cast = LazyLogits.__new__(LazyLogits)
        vars(cast).update(vars(self), _cast_to=args[0])
        return cast

    def contiguous(self) -> LazyLogits:
        """Return the logits, which will be contiguous."""
        return self

    def tensor(self) -> Tensor:
        """Return the logits, computed at the first call."""
        if self._computed is None:
            if not self.has_loss and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                warnings.warn(NOT_USED.format(self.option), stacklevel=3)
            enabled = self._autocast is not None
            with torch.autocast(self.device.type, dtype=self._autocast, enabled=enabled):
                logits: Tensor = self.head(self.hidden, task="logits")
            self._computed = logits if self._cast_to is None else logits.to(self._cast_to)
        return self._computed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch with the tensor."""
        return func(*map(_computed, args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """Return an attribute or method of the tensor."""
        if name.startswith("__") or "hidden" not in vars(self):  # copying and pickling ask an empty object
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        """Copy and pickle the logits as a tensor."""
        return _same, (self.tensor().detach(),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _computed(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value))
    return value


def _of_tensors(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(*operands: Any) -> Any:
        values = [_computed(operand) for operand in operands]
        return function(*(reversed(values) if swapped else values))

    return method


for _name in _OPERATORS:
    _plain = _name.strip("_")
    setattr(LazyLogits, f"__{_plain}__", _of_tensors(getattr(operator, _name)))
    if _name in _OPERATORS[:11]:
        setattr(LazyLogits, f"__r{_plain}__", _of_tensors(getattr(operator, _name), swapped=True))
