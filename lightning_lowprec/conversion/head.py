"""Replace the output head and the loss of a causal model of ``transformers``, in place.

    model(input_ids, labels=labels)             the model's own forward, unchanged
      |   self.lm_head(hidden)                  LossHead: in training it returns LazyLogits(hidden)
      |   self.loss_function(logits, labels)    _causal_loss: finds LazyLogits, calls LossHead with the labels
      |     LossHead                            losses.linear_cross_entropy(hidden, weight, labels)
      v
    loss, logits                                the logits are computed if anyone reads them

The class of the head changes, so that the layer, its weight, ties and names stay. The weight is read inside of the
layer's own forward, where FSDP2 has gathered it.

The forward of such a model does two things with the logits: it passes them to ``self.loss_function`` and returns them.
The source code shows that. A forward that computes with the logits (scales or caps them) is not recognised, unless the
configuration switches this part off.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_lowprec.conversion import in_place
from lightning_lowprec.losses import linear_cross_entropy
from lightning_lowprec.numerics.kernel_operands import ALIGNMENT
from lightning_lowprec.numerics.tensor_cores import Emulation
from lightning_lowprec.private import transformers

HeadKind = Literal["bf16", "chunked", "fp8", "fp32"]
_IGNORED: Final = -100
_BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHER: Final = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "getitem", "setitem")
WAY_OUT: Final = (
    "Leave `head` out, or compute the loss in your model by `lightning_lowprec.losses.linear_cross_entropy(hidden,"
    " lm_head.weight, targets)`"
)
NOT_USED: Final = (
    "`head={!r}` has no effect on this forward: its logits were read before a loss was computed from labels, so all of"
    " them were computed. Pass `labels=...` to the model, or compute the loss by"
    " `lightning_lowprec.losses.linear_cross_entropy`."
)
Task = Literal["logits"] | dict[str, Any] | None
"""To compute logits, or a loss from these arguments of ``linear_cross_entropy``; None: the mode of the head decides."""


@final
class LossHead(nn.Linear):
    """A Linear that computes the loss of its model from hidden states, some tokens at a time."""

    kind: HeadKind
    emulate: Emulation | None

    def forward(self, input: Tensor, task: Task = None) -> Any:
        """[*, K] -> [*, V]; in training without a task LazyLogits, with the arguments of a loss the loss."""
        if self.kind != "fp32":
            return self._compute(input, task)
        with torch.autocast(input.device.type, enabled=False):
            return self._compute(input.float(), task)

    def _compute(self, input: Tensor, task: Task) -> Any:
        if task is None and self.training and torch.is_grad_enabled():
            return LazyLogits(self, input)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.kind == "fp32":
            weight, bias = weight.float(), None if bias is None else bias.float()
        if not isinstance(task, dict):
            return F.linear(input, weight, bias)
        options: dict[str, Any] = {"bias": bias, "fp8": self.kind == "fp8", "emulate": self.emulate}
        return linear_cross_entropy(input.reshape(-1, input.shape[-1]), weight, **options, **task)


def _causal_loss(
    head: LossHead,
    logits: Any,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Return the mean loss over tokens that are not ignored, or their sum over ``num_items_in_batch``.

    In evaluation the loss is that of ``transformers``.
    """
    if not isinstance(logits, LazyLogits):
        if head.training and logits.requires_grad:
            raise RuntimeError(
                f"`head={head.kind!r}`: the model has read its logits before it asked for the loss. {WAY_OUT}."
            )
        rest = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **options}
        return transformers.causal_loss(logits, labels, vocab_size, shift_labels=shift_labels, **rest)
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits.has_loss = True
    task = {
        "target": shift_labels.reshape(-1).to(logits.device),
        "reduction": "mean" if num_items_in_batch is None else "sum",
        "ignore_index": ignore_index,
    }
    loss: Tensor = head(logits.hidden, task=task)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def replace_heads(model: nn.Module, kind: HeadKind, *, emulate: Emulation | None) -> list[str]:
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
class LazyLogits:
    """What a head returns in training in place of logits: whatever reads them gets the tensor, computed then.

    The tensor is the one that the Linear would have returned, with its graph. It can be read until the backward pass
    under FSDP2, which frees the weight then, and at any time elsewhere. ``hidden``, (..., K), is the input of the head.
    """

    def __init__(self, head: LossHead, hidden: Tensor) -> None:
        self.head = head
        self.hidden = hidden
        self.has_loss = False
        device = hidden.device.type
        self._autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._cast_to: torch.dtype | None = None
        self._computed: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

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
                warnings.warn(NOT_USED.format(self.head.kind), stacklevel=3)
            enabled = self._autocast is not None
            with torch.autocast(self.device.type, dtype=self._autocast, enabled=enabled):
                logits: Tensor = self.head(self.hidden, task="logits")
            self._computed = logits if self._cast_to is None else logits.to(self._cast_to)
        return self._computed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(_computed, args), **{name: _computed(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "hidden" not in vars(self):  # copying and pickling ask an empty object
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __hash__(self) -> int:
        return id(self)

    def __reduce__(self) -> Any:
        return Tensor.detach, (self.tensor().detach(),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


def _computed(value: Any) -> Any:
    if isinstance(value, LazyLogits):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(map(_computed, value))
    return value


def _of_tensor(name: str) -> Callable[..., Any]:
    def method(logits: LazyLogits, *operands: Any) -> Any:
        return getattr(logits.tensor(), name)(*map(_computed, operands))

    return method


for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHER):
    setattr(LazyLogits, f"__{_name}__", _of_tensor(f"__{_name}__"))


# ---- which models are recognised


def causal_models(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Yield the fqn of every causal model of ``transformers`` in ``model``, the causal model, and its head."""
    heads: set[int] = set()
    for fqn, module in model.named_modules():
        if not transformers.is_model(module):
            continue
        head = module.get_output_embeddings()
        if head is None or id(head) in heads:
            continue
        heads.add(id(head))
        reason = unrecognised(module, head)
        if reason is not None:
            name = f"{type(module).__name__}{f' ({fqn!r})' if fqn else ''}"
            raise ValueError(f"`head` cannot replace the loss of {name}: {reason}. {WAY_OUT}.")
        yield fqn, module, head
    if not heads:
        raise ValueError(
            f"`head` knows the heads and losses of causal models of `transformers`, and {type(model).__name__} holds"
            f" none. {WAY_OUT}."
        )


def unrecognised(model: Any, head: nn.Module) -> str | None:
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
    return _computes_with_logits(model, head)


def _computes_with_logits(model: Any, head: nn.Module) -> str | None:
    name = next((name for name, child in model.named_children() if child is head), None)
    if name is None:
        return "its head is no child of it"
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward)))
    except (OSError, TypeError):
        return "the source code of its forward is not there to be read"
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and _is_off(node.test, model.config):
            node.body = []
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    logits, others = _results_of(f"self.{name}", parents)
    if not logits:
        return f"its forward does not call {name!r} alone on a line"
    reads = [node for node in parents if isinstance(node, ast.Name) and node.lineno > logits.get(node.id, math.inf)]
    if not any(_taker_of(node, parents) == "self.loss_function" for node in reads):
        return "its forward does not pass the logits to `self.loss_function`"
    lines = source.splitlines()
    uses = [(node.lineno, ast.unparse(node)) for node in others]
    uses += [(n.lineno, lines[n.lineno - 1].partition("#")[0].strip()) for n in reads if _computes(n, parents)]
    return f"its forward computes with the logits (`{min(uses)[1]}`)" if uses else None


def _is_off(test: ast.expr, config: Any) -> bool:
    """Return whether the configuration switches a branch off: ``if self.config.name is not None:``."""
    words, _, name = ast.unparse(test).removesuffix(" is not None").rpartition(".")
    return ast.unparse(test).endswith(" is not None") and words == "self.config" and getattr(config, name, 0) is None


def _results_of(head: str, parents: Mapping[ast.AST, ast.AST]) -> tuple[dict[str, int], list[ast.expr | ast.stmt]]:
    """Return the line in which each variable becomes the result of ``head(...)``, and the calls used in other ways."""
    lines: dict[str, int] = {}
    others: list[ast.expr | ast.stmt] = []
    for node in parents:
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == head):
            continue
        place = parents[node]
        if isinstance(place, ast.Attribute) and place.attr == "contiguous":
            place = parents[parents[place]]
        if isinstance(place, ast.Assign) and len(place.targets) == 1 and isinstance(place.targets[0], ast.Name):
            lines[place.targets[0].id] = node.lineno
        else:
            others.append(place if isinstance(place, ast.Assign) else node)
    return lines, others


def _taker_of(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> str:
    """Return the function of which a node is an argument, or ""."""
    taker = parents[node]
    if isinstance(taker, ast.keyword):
        taker = parents[taker]
    return ast.unparse(taker.func) if isinstance(taker, ast.Call) and node is not taker.func else ""


def _computes(node: ast.Name, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether logits are used for anything but the loss, their facts, and what is returned."""
    taker, parent = _taker_of(node, parents), parents[node]
    if isinstance(parent, ast.Attribute):
        return parent.attr not in ("device", "dtype", "shape")
    # a class, such as `CausalLMOutputWithPast(logits=logits)`, or `(logits,) + outputs`
    return not (taker == "self.loss_function" or taker[:1].isupper() or isinstance(parent, ast.Tuple))
