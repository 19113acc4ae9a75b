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

from dataclasses import dataclass
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.conversion.head_recognition import WAY_OUT, causal_models
from lightning_lowprec.conversion.lazy_logits import LazyLogits
from lightning_lowprec.conversion.plain_first import RefusedQConfig
from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.private import transformers

HeadKind = Literal["bf16", "chunked", "fp8", "fp32"]
_IGNORED: Final = -100


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
        """Return the mean loss over tokens that are not ignored, or their sum over ``num_items_in_batch``.

        Raises:
            RuntimeError: the model has computed with the logits before.
        """
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


def replace(model: nn.Module, kind: HeadKind, *, emulate: bool | None) -> list[str]:
    """Replace heads and losses of the causal models in ``model``, in place; return the fqns of these models.

    Args:
        model: holds one or several causal models of ``transformers``.
        kind: ``"chunked"``, ``"fp8"`` or ``"fp32"``.
        emulate: see :func:`~lightning_lowprec.losses.linear_cross_entropy`.

    Raises:
        ValueError: a model is not recognised exactly, or its features do not fit FP8 kernels.
    """
    found = list(causal_models(model))
    for fqn, causal, head in found:
        if kind == "fp8" and head.in_features % ALIGNMENT:
            raise ValueError(
                f"`head='fp8'` needs a multiple of {ALIGNMENT} hidden features, and the head of"
                f" {type(causal).__name__}{f' ({fqn!r})' if fqn else ''} has {head.in_features}; use `head='chunked'`."
            )
    for _, causal, head in found:
        in_place.become(head, LossHead, {"kind": kind, "emulate": emulate})
        transformers.set_loss(causal, CausalLoss(head))  # type: ignore[arg-type]
    return [fqn for fqn, *_ in found]


def revert(model: nn.Module) -> None:
    """Undo :func:`replace`, in place."""
    for module in model.modules():
        if isinstance(transformers.loss_of(module), CausalLoss):
            transformers.set_loss(module, None)
        if isinstance(module, LossHead):
            in_place.revert(module)
