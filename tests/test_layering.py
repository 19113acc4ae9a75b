"""Imports run down the floors only; private names of other libraries stand in `private/`; files stay small."""

import ast
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_lowprec"
OWN = "lightning_lowprec"
FLOORS = [
    {"numerics", "hardware", "extras", "checks", "references", "private"},
    {"conversion"},
    {"masters"},
    {"precision"},
    {"torchao", "te", "msamp"},
    {"fsdp2", "callbacks"},
    {"names", "registration", "recipes", "strategies"},
    {"tools"},
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
MAY_IMPORT_EACH_OTHER = [
    {"names", "registration", "recipes", "strategies"},
    {"numerics", "hardware", "extras", "checks", "references", "private"},
]
LIGHTNING_FROM = FLOOR["precision"]
MODULES = sorted(PACKAGE.rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    """Every dotted name that a module imports; `from a import b` counts as `a.b`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def refused(part: str, tree: ast.AST) -> set[str]:
    """The rooms that a module of the room `part` imports and must not: higher ones, and siblings that stand alone."""
    rooms = {name.split(".")[1] for name in imported(tree) if name.startswith(OWN + ".")} - {part}
    rooms = {name for name in rooms if name in FLOOR}
    together = next((group for group in MAY_IMPORT_EACH_OTHER if part in group), set())
    return {name for name in rooms if FLOOR[name] >= FLOOR[part] and name not in together}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_down(path):
    part = room(path)
    if part == "__init__":
        return  # the public names and one call
    tree = ast.parse(path.read_text())
    assert refused(part, tree) == set()
    if FLOOR[part] < LIGHTNING_FROM and part != "private":
        assert not {name for name in imported(tree) if name.split(".")[0] == "lightning"}, "no Lightning below floor 3"


def test_the_layering_test_can_fail():
    assert refused("conversion", ast.parse("from lightning_lowprec.precision.half import HalfMixed")) == {"precision"}
    assert refused("te", ast.parse("def f():\n    import lightning_lowprec.torchao.linear")) == {"torchao"}
    assert refused("fsdp2", ast.parse("from lightning_lowprec import msamp, tools")) == {"tools"}
    assert refused("tools", ast.parse("from lightning_lowprec.conversion import plan")) == set()


def circles() -> list[list[str]]:
    """Circles among the modules of the package, by what they import anywhere, in functions too."""
    names = {str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", "."): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {}
    for name, path in names.items():
        found = imported(ast.parse(path.read_text()))
        found = {other if other in names else other.rpartition(".")[0] for other in found}
        graph[name] = {other for other in found if other in names and other != name}
    state: dict[str, int] = {}
    rings: list[list[str]] = []

    def visit(name: str, trail: list[str]) -> None:
        state[name] = 1
        for other in sorted(graph[name]):
            if state.get(other) == 1:
                rings.append([*trail[trail.index(other) :], other] if other in trail else [name, other])
            elif other not in state:
                visit(other, [*trail, other])
        state[name] = 2

    for name in graph:
        if name not in state and name != OWN:
            visit(name, [name])
    return rings


def test_no_module_imports_in_a_circle():
    assert circles() == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 450
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            assert node.end_lineno - node.lineno < 60, node.name


def test_half_of_the_files_are_short_and_the_package_stays_below_its_bound():
    lines = [path.read_text().count("\n") for path in MODULES]
    assert median(lines) <= 120
    assert sum(lines) < 15_500
