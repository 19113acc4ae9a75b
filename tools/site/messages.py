"""Collect the error messages and warnings of the package from its source, for the page of messages."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_lowprec"
ROOMS = {
    "": "Names, hardware and registration",
    "conversion": "Which layers convert",
    "precision": "Plugins, loss scale",
    "masters": "Half-precision weights and optimizers",
    "products": "Products of a layer",
    "torchao": "FP8, int8 and MXFP8 by torchao",
    "te": "Transformer Engine",
    "msamp": "MS-AMP",
    "numerics": "Casts and products",
    "fsdp2": "FSDP2",
    "checkpoints": "Checkpoints",
    "zero": "DeepSpeed",
    "callbacks": "Monitor",
    "serving": "Export and serving",
    "tools": "The lowprec command",
    "private": "Versions of torch, Lightning, torchao, Transformer Engine and transformers",
}
"""The folders of the package, in the order of the page, and their titles."""
GAP = "…"
"""Stands for what a message takes from the run: a name, a value, a shape."""
WORDS = 5
"""A string of fewer words is a message only if it ends with a full stop."""


@functools.cache
def messages(path: Path) -> tuple[str, ...]:
    """Return the messages of one file, in order, each once: what is raised, warned, or returned as a reason."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: dict[str, None] = {}
    for node in _spoken(tree):
        for text in _texts(node):
            if _is_sentence(text):
                found[" ".join(text.split())] = None
    return tuple(found)


def _is_sentence(text: str) -> bool:
    """Return whether a string has enough words to be a message; shorter ones need a full stop."""
    words = [word for word in text.split() if re.search("[A-Za-z]{2}", word)]
    return len(words) >= WORDS or (len(words) > 1 and text.endswith("."))


def _spoken(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the expressions that reach a user: of ``raise``, of calls that warn, of functions that return a reason."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from [*node.exc.args, *(word.value for word in node.exc.keywords)]
        elif isinstance(node, ast.Call) and re.search("warn|info|error|refus", ast.unparse(node.func).lower()):
            yield from node.args
        elif isinstance(node, ast.FunctionDef) and _returns_text(node):
            yield from (kept.value for kept in ast.walk(node) if isinstance(kept, ast.Return) and kept.value)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and not _is_help(node.value):
            yield node.value


def _is_help(value: ast.AST) -> bool:
    """Return whether an assigned value is the table of commands or names, or the parser of a command."""
    keys = value.keys if isinstance(value, ast.Dict) else []
    shown = any(isinstance(key, ast.Constant) and key.value in ("doctor", "half-auto", "fp8-hybrid") for key in keys)
    return shown or "ArgumentParser" in ast.unparse(value)


def _returns_text(function: ast.FunctionDef) -> bool:
    returned = "" if function.returns is None else ast.unparse(function.returns)
    return re.search(r"\bstr\b|Error|Exception|Warning", returned) is not None


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the strings of an expression; parts joined by ``+`` are one, and an f-string has gaps."""
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        joined = _joined(node)
        if joined is not None:
            yield joined
            return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _joined(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_joined(node.left), _joined(node.right)]
        return None if sides == [None, None] else "".join(GAP if side is None else side for side in sides)
    return None


def page() -> str:
    """Return the sections of the page, a list per folder of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    rooms = {path: path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "" for path in files}
    unknown = set(rooms.values()) - set(ROOMS)
    if unknown:
        raise ValueError(f"no title for {sorted(unknown)} in `ROOMS`.")
    sections = []
    for room, title in ROOMS.items():
        found = dict.fromkeys(text for path in files if rooms[path] == room for text in messages(path))
        rows = "\n".join(f"<li>{_as_html(text)}</li>" for text in found)
        sections.append(f"## {title}\n\n<ul>\n{rows}\n</ul>")
    return "\n\n".join(sections)


def _as_html(text: str) -> str:
    """Return a message as HTML, with its backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
