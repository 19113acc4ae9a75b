"""The rules that keep a Linear in high precision. Each returns fqns with a reason, or a reason for one layer."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

FEATURE_ALIGNMENT = 16
"""``torch._scaled_mm`` takes matrices whose inner dimensions are multiples of 16 (bytes of its 128-bit loads)."""
HEAD_NAMES = ("lm_head", "output", "head", "embed_out")
"""Last component of an output head's fqn in the model families of ``transformers``, torchtitan and timm."""
LINEAR_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Every Linear of the model (subclasses too) by fqn, in the order of ``named_modules``; a root Linear is ``""``."""
    return {fqn: module for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}


def output_heads(model: nn.Module) -> dict[str, str]:
    """The output heads by fqn, with the rule that found them.

    The first rule that finds any decides: ``get_output_embeddings()``; a weight tied to an Embedding; an fqn ending
    in one of ``HEAD_NAMES``. Never simply the last Linear, which in many models is an ordinary one.
    """
    candidates = linears(model)
    for rule in (_declared_heads, _tied_heads, _named_heads):
        found = {fqn: reason for fqn, reason in rule(model) if fqn in candidates}
        if found:
            return found
    return {}


def _declared_heads(model: nn.Module) -> Iterator[tuple[str, str]]:
    fqns = {id(module): fqn for fqn, module in model.named_modules()}
    for module in model.modules():
        getter = getattr(module, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if id(head) in fqns:
            yield fqns[id(head)], "output head (get_output_embeddings())"


def _tied_heads(model: nn.Module) -> Iterator[tuple[str, str]]:
    embeddings = {id(m.weight): fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for fqn, linear in linears(model).items():
        if id(linear.weight) in embeddings:
            yield fqn, f"output head (tied to the embedding {embeddings[id(linear.weight)]!r})"


def _named_heads(model: nn.Module) -> Iterator[tuple[str, str]]:
    for fqn in linears(model):
        if fqn.rpartition(".")[2] in HEAD_NAMES:
            yield fqn, "output head (by name)"


def unsupported(linear: nn.Linear) -> str | None:
    """Why this Linear cannot convert, whatever the user wishes, or None."""
    if type(linear) is not nn.Linear:
        return f"a subclass of Linear ({type(linear).__name__})"
    if "forward" in linear.__dict__:
        return "its forward is replaced on the instance"
    if linear.weight.dtype not in LINEAR_DTYPES:
        return f"weights of {linear.weight.dtype}"
    if linear.in_features % FEATURE_ALIGNMENT or linear.out_features % FEATURE_ALIGNMENT:
        return f"features are no multiples of {FEATURE_ALIGNMENT}"
    return None


def kept_by_user(model: nn.Module, keep: Sequence[str]) -> dict[str, str]:
    """The Linears that the user's names or patterns keep, by fqn.

    A name matches whole components anywhere in the fqn (``"lm_head"``, ``"blocks.0"``); with ``*``, ``?`` or ``[``
    it is a shell pattern over the whole fqn (``"*.mlp.*"``).

    Raises:
        ValueError: a name or pattern that matches no Linear; the nearest fqns are listed.
    """
    fqns = list(linears(model))
    kept: dict[str, str] = {}
    for pattern in keep:
        matches = [fqn for fqn in fqns if _matches(pattern, fqn)]
        if not matches:
            near = difflib.get_close_matches(pattern, fqns, n=3, cutoff=0.3) or fqns[:3]
            raise ValueError(
                f"`keep={pattern!r}` matches no Linear of the model; the nearest are: {', '.join(map(repr, near))}"
                f" (of {len(fqns)}). Give part of an fqn ('lm_head', 'blocks.0') or a pattern ('*.mlp.*')."
            )
        kept |= dict.fromkeys(matches, f"kept by {pattern!r}")
    return kept


def _matches(pattern: str, fqn: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatchcase(fqn, pattern)
    return f".{pattern}." in f".{fqn}."
