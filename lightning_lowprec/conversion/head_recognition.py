"""Find the output heads of causal language models of ``transformers`` whose loss may be computed from hidden states.

Such a model's ``forward`` does two things with the logits: it passes them to ``self.loss_function`` and returns them.
The source code of ``forward`` shows that. A forward that computes with the logits (scales or caps them) is not
recognised, unless the configuration switches this part off.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, final

from torch import nn

from lightning_lowprec.private import transformers

WAY_OUT = (
    "Leave `head` out, or compute the loss in your model by `lightning_lowprec.losses.linear_cross_entropy(hidden,"
    " lm_head.weight, targets)`"
)


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
    logits = _Logits(name, model.config, source.splitlines())
    logits.visit(ast.parse(source))
    if not logits.calls:
        return f"its forward does not call {name!r} alone on a line"
    if not logits.losses:
        return "its forward does not pass the logits to `self.loss_function`"
    return None if not logits.uses else f"its forward computes with the logits (`{logits.uses[0]}`)"


@final
class _Logits(ast.NodeVisitor):
    """The uses of the result of ``self.<head>(...)`` in a forward, other than the loss and what is returned."""

    def __init__(self, head: str, config: Any, lines: list[str]) -> None:
        self.head = head
        self.lines = lines
        self.config = config
        self.calls: list[str] = []
        self.losses = 0
        self.uses: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        """Skip what the configuration switches off: ``if self.config.name is not None:``."""
        if not self._is_off(node.test):
            for child in node.body:
                self.visit(child)
        self.visit(node.test)
        for child in node.orelse:
            self.visit(child)

    def _is_off(self, test: ast.expr) -> bool:
        if not (isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)):
            return False
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        prefix = "self.config."
        return right == "None" and left.startswith(prefix) and getattr(self.config, left[len(prefix) :], 0) is None

    def visit_Assign(self, node: ast.Assign) -> None:
        """Note the name that the head's result gets."""
        value, target = node.value, node.targets[0]
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "contiguous":
            value = value.func.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == f"self.{self.head}":
            if isinstance(target, ast.Name) and len(node.targets) == 1:
                self.calls.append(target.id)
            else:
                self.uses.append(ast.unparse(node))
            return
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Allow the logits as an argument of the loss, and as a part of what is returned."""
        function = ast.unparse(node.func)
        if function == f"self.{self.head}":
            self.uses.append(ast.unparse(node))
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        direct = [part for part in arguments if self._is_logits(part)]
        if direct and function == "self.loss_function":
            self.losses += 1
        elif direct and not function[:1].isupper():  # a class, such as `CausalLMOutputWithPast(logits=logits)`
            self.uses.append(ast.unparse(node))
        for part in arguments:
            if not self._is_logits(part):
                self.visit(part)
        self.visit(node.func)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Allow ``logits.device`` and other facts."""
        if not (self._is_logits(node.value) and node.attr in ("device", "dtype", "shape")):
            self.visit(node.value)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """Allow ``(logits,) + outputs``."""
        for part in node.elts:
            if not self._is_logits(part):
                self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        """Note every other use."""
        if self._is_logits(node):
            self.uses.append(self.lines[node.lineno - 1].partition("#")[0].strip())

    def _is_logits(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id in self.calls
