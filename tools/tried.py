"""Say what the tests never try: conditions that were never true or never false, loops that never had two turns.

python -m tools.tried -n 2 --tier 1        # what follows goes to pytest

Writes recorders into the syntax trees of the package, in a copy of the repository, and runs pytest there, with the
processes that its tests start. Prints, by file and line, what is surely not seen if somebody gets it wrong. What torch
compiles is not recorded, nor are Triton's kernels. Tests that read the source of the package fail in the copy.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from tools.versions import ROOT

OUTCOMES: Final = {
    "condition": ("false", "true"),
    "operand": ("false", "true"),
    "loop": ("no turn", "one turn", "two turns"),
    "except": ("entered",),
    "finally": ("reached without an exception", "reached by an exception"),
}
WIDTH: Final = 3  # outcomes of a place at most
OPTIONAL: Final = {"no turn", "one turn"}  # a loop needs two turns only

RECORDER: Final = """
import mmap, os, sys
{compiling}

def _open():
    global seen
    descriptor = os.open(os.path.join({folder!r}, f"{{os.getpid()}}-{{os.urandom(4).hex()}}"), os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, {size})
    seen = mmap.mmap(descriptor, {size})  # the file has what was seen however the process ends
    os.close(descriptor)

def note(place, outcome):
    if not compiling():
        seen[{width} * place + outcome] = 1

def condition(place, value):
    if compiling():
        return value
    value = bool(value)
    note(place, value)
    return value

def operand(place, value):
    if not compiling() and type(value).__name__ not in ("Tensor", "DTensor", "ndarray"):
        note(place, bool(value))
    return value

def loop(place, turns):
    return turns if compiling() else _turns(place, turns)

def _turns(place, turns):
    count = 0
    try:
        for turn in turns:
            count += 1
            yield turn
    finally:
        note(place, min(count, 2))

def left(place):
    if not compiling():
        note(place, sys.exc_info()[0] is not None)

_open()
os.register_at_fork(after_in_child=_open)
"""


class Place(NamedTuple):
    """Something in the package that can turn out in more than one way."""

    file: str
    line: int
    kind: str
    text: str


class _Recorders(ast.NodeTransformer):
    """Writes calls of the recorder into the syntax tree of a file, and notes the places."""

    def __init__(self, file: str, places: list[Place]) -> None:
        self.file, self.places = file, places

    def place(self, node: ast.expr | ast.stmt | ast.ExceptHandler, kind: str) -> ast.Constant:
        self.places.append(Place(self.file, node.lineno, kind, ast.unparse(node).partition("\n")[0][:120]))
        return ast.Constant(len(self.places) - 1)

    def recorded(self, kind: str, node: ast.expr) -> ast.expr:
        place = self.place(node, kind)
        return _call(kind, place, self.visit(node))

    def truth(self, node: ast.expr) -> ast.expr:
        """Record a condition; of ``and``, ``or`` and ``not`` the parts are recorded."""
        whole = isinstance(node, ast.BoolOp | ast.UnaryOp) or ast.unparse(node).endswith("TYPE_CHECKING")
        return self.visit(node) if whole else self.recorded("condition", node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        parts = (ast.BoolOp, ast.UnaryOp)
        node.values = [self.visit(v) if isinstance(v, parts) else self.recorded("operand", v) for v in node.values]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        node.operand = self.truth(node.operand) if isinstance(node.op, ast.Not) else self.visit(node.operand)
        return node

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        test, node.test = node.test, ast.Constant(None)
        self.generic_visit(node)
        node.test = self.truth(test)
        return node

    visit_While = visit_IfExp = visit_If

    def visit_For(self, node: ast.For) -> ast.For:
        turns, node.iter = node.iter, ast.Constant(None)
        self.generic_visit(node)
        node.iter = self.recorded("loop", turns)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.recorded("loop", node.iter)
        node.ifs = [self.truth(condition) for condition in node.ifs]
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        for handler in node.handlers:
            handler.body.insert(0, ast.Expr(_call("note", self.place(handler, "except"), ast.Constant(0))))
        final = [ast.Expr(_call("left", self.place(node.finalbody[0], "finally")))] if node.finalbody else []
        self.generic_visit(node)
        node.finalbody = [*final, *node.finalbody]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name("_recorder", ast.Load()), name, ast.Load()), list(args), [])


def write_recorders(copy: Path, folder: Path) -> list[Place]:
    """Write recorders into the package of a copy, which write files into a folder; return the places."""
    places: list[Place] = []
    for path in sorted((copy / "lightning_lowprec").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names}
        recorder = "recorder_with_torch" if "torch" in names else "recorder"
        tree = _Recorders(str(path.relative_to(copy)), places).visit(tree)
        stay = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"] or tree.body[:1]
        tree.body.insert(tree.body.index(stay[-1]) + 1, ast.Import([ast.alias(recorder, "_recorder")]))
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    for name, compiling in (
        ("recorder", "compiling = bool"),
        ("recorder_with_torch", "from torch.compiler import is_compiling as compiling"),
    ):
        text = RECORDER.format(compiling=compiling, folder=str(folder), size=WIDTH * len(places), width=WIDTH)
        (copy / f"{name}.py").write_text(text, encoding="utf-8")
    return places


def never(places: list[Place], folder: Path) -> dict[str, list[str]]:
    """Return, by file, a line for each place of which not all outcomes were seen."""
    seen = [0] * (WIDTH * len(places))
    for file in folder.iterdir():
        seen = [one | other for one, other in zip(seen, file.read_bytes(), strict=True)]
    found = defaultdict(list)
    for number, place in enumerate(places):
        outcomes = dict(zip(OUTCOMES[place.kind], seen[WIDTH * number :], strict=False))
        missing = [name for name, was in outcomes.items() if not was and name not in OPTIONAL]
        if missing:
            what = "never run" if not any(outcomes.values()) else f"never {' or '.join(missing)}"
            found[place.file].append(f"{place.line}: {what}: {place.kind} `{place.text}`")
    return found


def main(arguments: list[str]) -> int:
    """Run the tests of a copy with these arguments of pytest, and print what they never try."""
    with tempfile.TemporaryDirectory() as temporary:
        copy, folder = Path(temporary, "copy"), Path(temporary, "seen")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "site"))
        folder.mkdir()
        places = write_recorders(copy, folder)
        paths = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        print("tests of the copy:", flush=True)
        subprocess.run(command, cwd=copy, env=environment, check=False)
        found = never(places, folder)
    print(f"{sum(map(len, found.values()))} of {len(places)} places were not tried in every way")
    for file, lines in found.items():
        print(f"\n{file}", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
