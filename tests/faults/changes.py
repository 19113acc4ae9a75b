"""Finds small changes of the package in its syntax trees, and draws some of them by a seed.

A change has a name that stays when code moves: the function, the text of the statement, and what becomes of it.
"""

import ast
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_lowprec"
ROOMS = (
    "numerics", "products", "conversion", "masters", "precision", "checkpoints", "torchao", "te", "msamp", "fsdp2",
    "zero", "serving", "callbacks", "tools", "registration",
)  # fmt: skip
"""Folders of the package, and one file; each has at least ``FEWEST`` faults."""
FEWEST = 8

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|",
}  # fmt: skip
DTYPES = {
    "float32": "bfloat16", "bfloat16": "float32", "float16": "bfloat16", "float64": "float32", "int32": "int64",
    "int64": "int32", "uint8": "int8", "int8": "uint8", "float8_e4m3fn": "float8_e5m2", "float8_e5m2": "float8_e4m3fn",
    "E4M3": "E5M2", "E5M2": "E4M3",
}  # fmt: skip
AXES = {"-1": "0", "0": "-1", "1": "0"}
SAYS_NOTHING = {"stacklevel", "strict", "help", "msg"}
"""Keywords that only messages have, or that check what always holds."""
TALKS = {"info", "warn", "warning", "print", "write", "add_argument"}
"""Functions whose arguments are words for a person."""


@dataclass(frozen=True)
class Change:
    """One small change of one statement of one function."""

    function: str
    """The file in the package and the qualified name: ``masters/moments.py:Moments.step``."""
    statement: str
    """The text of the statement, without its body."""
    change: str
    """The kind, and the expression before and after."""
    count: int = 0
    """How many statements and changes of the function before this one have the same text."""
    line: int = field(default=0, compare=False)
    last: int = field(default=0, compare=False)
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)
    new: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.function, self.statement, self.change, self.count

    @property
    def room(self) -> str:
        return room(self.function.partition(":")[0])

    @property
    def kind(self) -> str:
        return self.change.partition(":")[0]

    def file(self, package: Path = PACKAGE) -> Path:
        return package / self.function.partition(":")[0]

    def planted(self, source: str) -> str:
        """Return the source of the file with the change."""
        text = source.encode()
        return (text[: self.start] + self.new.encode() + text[self.end :]).decode()


def room(file: str) -> str:
    """Return the folder of the package that a file lies in, or the name of a file that is a room itself."""
    first = file.partition("/")[0].removesuffix(".py")
    return first if first in ROOMS or "/" in file else "others"


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a file, nested ones too, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        yield from functions(node, f"{prefix}{node.name}." if named else prefix)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a function, those of functions and classes in it left out."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            continue
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):  # a docstring
            yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, []))
        for part in getattr(statement, "handlers", []) + getattr(statement, "cases", []):
            yield from statements(part.body)


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions of a statement itself: no body, annotation, or text for a person."""
    waiting: list[ast.AST] = [
        child
        for name, value in ast.iter_fields(statement)
        if name not in ("body", "orelse", "finalbody", "handlers", "cases", "annotation")
        for child in (value if isinstance(value, list) else [value])
        if isinstance(child, ast.AST)
    ]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and called(node) in TALKS):
            continue
        if isinstance(node, ast.keyword) and node.arg in SAYS_NOTHING:
            continue
        if isinstance(node, ast.expr):
            yield node
        waiting += ast.iter_child_nodes(node)


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def of_expression(node: ast.expr) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield changes of an expression: the kind, the part that is replaced, and the new text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", node, repr(node.value * 2 if isinstance(node.value, float) and node.value else node.value + 1)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        operator = COMPARED[type(node.ops[0])]
        yield "comparison", node, f"({ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])})"
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield "operator", node, f"(({ast.unparse(node.left)}) {COMPUTED[type(node.op)]} ({ast.unparse(node.right)}))"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield "condition", node, "(" + other.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield "sign", node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield "branch", node, "({2} if {1} else {0})".format(*map(ast.unparse, (node.body, node.test, node.orelse)))
    elif isinstance(node, ast.Attribute | ast.Name):
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        if name in DTYPES and isinstance(node.ctx, ast.Load):
            yield "dtype", node, ast.unparse(node).removesuffix(name) + DTYPES[name]
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg in ("dim", "axis") and ast.unparse(keyword.value) in AXES:
                yield "axis", keyword.value, AXES[ast.unparse(keyword.value)]
            elif keyword.arg and keyword.arg not in SAYS_NOTHING:
                kept = [word for word in node.keywords if word is not keyword]
                yield "argument", node, ast.unparse(ast.Call(node.func, node.args, kept))


def of_statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield changes of a statement, those of its expressions too."""
    left_out = isinstance(node, ast.AugAssign | ast.Delete) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    )
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        left_out = called(node.value) not in TALKS and "super()" not in ast.unparse(node.value.func)
    if left_out:
        yield "left out", node, "pass"
    if isinstance(node, ast.If) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
        yield "branch", node.test, f"not ({ast.unparse(node.test)})"
    if isinstance(node, ast.Return) and node.value is not None:
        value = node.value
        if isinstance(value, ast.Tuple) and len(value.elts) == 2:
            yield "returned", value, "({1}, {0})".format(*map(ast.unparse, value.elts))
        elif isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
            yield "returned", value, ast.unparse(value.args[0])
    for expression in expressions(node):
        yield from of_expression(expression)


@cache
def changes_of(file: str, source: str) -> tuple[Change, ...]:
    """Return every change of a file.

    Args:
        file: its path in the package.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    found, seen = [], Counter[tuple[str, str, str]]()
    for name, function in functions(ast.parse(source)):
        if name.endswith(("__repr__", "extra_repr")):
            continue
        for statement in statements(function.body):
            text = ast.unparse(statement).partition("\n")[0]
            for kind, part, new in of_statement(statement):
                key = f"{file}:{name}", text, f"{kind}: {ast.unparse(part).partition(chr(10))[0]} -> {new}"
                span = [starts[part.lineno - 1] + part.col_offset, starts[part.end_lineno - 1] + part.end_col_offset]
                last = min([statement.end_lineno, *(child.lineno - 1 for child in getattr(statement, "body", []))])
                found.append(Change(*key, seen[key], statement.lineno, max(last, statement.lineno), *span, new))
                seen[key] += 1
    return tuple(found)


def all_changes(package: Path = PACKAGE) -> list[Change]:
    """Return every change of the package that leaves it a program."""
    files = {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    return [change for file, source in files.items() for change in changes_of(file, source)]


def find(key: tuple[str, str, str, int], changes: dict[tuple[str, str, str, int], Change]) -> Change | None:
    """Return the change of this name, or the only one of this name in another file, or None: the code has gone."""
    if key in changes:
        return changes[key]
    name = key[0].partition(":")[2]
    moved = [change for other, change in changes.items() if other[1:] == key[1:] and other[0].endswith(f":{name}")]
    return moved[0] if len(moved) == 1 else None


def shares(changes: list[Change], total: int) -> dict[str, int]:
    """Return how many faults each room gets: by its lines that can be changed, and ``FEWEST`` at least."""
    lines = Counter(room for room, *_ in {(change.room, change.function, change.line) for change in changes})
    free = total - FEWEST * len(ROOMS)
    return {name: FEWEST * (name in ROOMS) + round(free * lines[name] / lines.total()) for name in sorted(lines)}


def draw(changes: list[Change], seed: int, total: int) -> list[Change]:
    """Draw faults: in each room all kinds in turn, and no function twice while others are left.

    The order in a room is that of hashes of names, so a function that goes takes only its own faults with it.
    """
    rooms = defaultdict(list)
    for change in changes:
        rooms[change.room].append(change)
    return [drawn for name, share in shares(changes, total).items() for drawn in draw_of(rooms[name], seed, share)]


def draw_of(changes: list[Change], seed: int, count: int) -> list[Change]:
    """Draw faults, whatever their rooms are."""
    of_kind, of_function, drawn = Counter[str](), Counter[str](), []
    waiting = sorted(changes, key=lambda change: hashlib.sha256(f"{seed}{change.key}".encode()).digest())
    for _ in range(min(count, len(waiting))):
        change = min(waiting, key=lambda change: (of_function[change.function], of_kind[change.kind]))
        waiting.remove(change)
        of_function[change.function] += 1
        of_kind[change.kind] += 1
        drawn.append(change)
    return drawn
