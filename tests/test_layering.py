"""Imports run down the floors only; private names of other libraries stand in `private/`; files stay small."""

import ast
import functools
import re
from pathlib import Path
from statistics import median

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_lowprec"
OWN = "lightning_lowprec"
FLOORS = [
    {
        *("numerics", "hardware", "runs_where", "extras", "checks", "other_stacks", "gone", "losses", "messages"),
        *("version", "private"),
    },
    {"products"},
    {"conversion"},
    {"masters"},
    {"precision", "checkpoints"},
    {"torchao", "te", "msamp"},
    {"fsdp2", "zero", "callbacks"},
    {"names", "registration", "recipes", "strategies"},
    {"serving"},
    {"tools"},
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
MAY_IMPORT_EACH_OTHER = [FLOORS[0], FLOORS[FLOOR["names"]]]
LIGHTNING_FROM = FLOOR["precision"]
TYPES = "TYPE_CHECKING"
MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@functools.cache
def imported(tree: ast.AST) -> set[str]:
    """Every dotted name that a module imports; `from a import b` counts as `a.b`."""
    names = set()
    for node in nodes_of(tree):
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
    tree = tree_of(path)
    assert refused(part, tree) == set()
    if FLOOR[part] < LIGHTNING_FROM and part != "private":
        assert not any(name.startswith(f"{OWN}.private.either") for name in imported(tree)), (
            "no Lightning below floor 4"
        )
    if path.relative_to(PACKAGE) != Path("private/either.py"):
        packages = {"lightning", "lightning_fabric", "pytorch_lightning"}
        assert not {name for name in imported(tree) if name.split(".")[0] in packages}, "only one of them may be there"


def test_the_layering_test_can_fail():
    assert refused("conversion", ast.parse("from lightning_lowprec.precision.half import HalfMixed")) == {"precision"}
    assert refused("te", ast.parse("def f():\n    import lightning_lowprec.torchao.linear")) == {"torchao"}
    assert refused("fsdp2", ast.parse("from lightning_lowprec import msamp, tools")) == {"tools"}
    assert refused("tools", ast.parse("from lightning_lowprec.conversion import plan")) == set()


def circles() -> list[list[str]]:
    """Circles among the modules of the package, by what they import anywhere, in functions too, but not for types."""
    names = {str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", "."): path for path in MODULES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graph = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == TYPES)]
        found = imported(tree)
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
    assert path.read_text().count("\n") <= 450
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__":
            assert node.end_lineno - node.lineno < 60, node.name


def test_half_of_the_files_are_short():
    assert median(path.read_text().count("\n") for path in MODULES) <= 160


@functools.cache
def own_private_names() -> set[str]:
    """Every private name that the package itself defines: functions, classes, attributes, fields, arguments."""
    names = set()
    for path in MODULES:
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return names


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """Private names of other libraries that a module reads: by attribute, by import, or by a string for `getattr`."""
    found = {node.attr for node in nodes_of(tree) if isinstance(node, ast.Attribute) and private(node.attr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and private(name.value):
                found.add(name.value)
    imports = {part for name in imported(tree) if not name.startswith(OWN) for part in name.split(".")}
    return {name for name in found if name not in own} | {part for part in imports if private(part)}


HARMLESS = {
    "_modules", "_parameters", "_buffers", "_apply", "_save_to_state_dict", "_load_from_state_dict",
    "_get_name", "_non_persistent_buffers_set",
}  # fmt: skip
"""Names of `nn.Module` that torch's documentation and subclasses everywhere use."""


SIMULATION = Path("tools/fits")


def test_only_the_command_opens_the_simulation_of_a_gpu():
    outside = [path for path in MODULES if SIMULATION not in path.relative_to(PACKAGE).parents]
    opened = {path for path in outside if any(name.startswith(f"{OWN}.tools.fits") for name in imported(tree_of(path)))}
    assert opened == {PACKAGE / "tools/planning/command.py"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_other_libraries_stand_in_private(path):
    if room(path) != "private" and path.relative_to(PACKAGE) != SIMULATION / "fake_gpu.py":
        assert foreign_private_names(tree_of(path), own_private_names() | HARMLESS) == set()


def test_the_test_of_private_names_can_fail():
    seen = ast.parse("import torch._dynamo\nx._scaled_thing()\ngetattr(y, '_state_of_it')\nself._mine")
    assert foreign_private_names(seen, {"_mine"}) == {"_dynamo", "_scaled_thing", "_state_of_it"}


MEANT_TO_BE_EXTENDED = {"StdlibText", "ByteGPT", "Block"}
"""The demo, which users take apart."""


def classes_without_final() -> set[str]:
    """Classes that are neither extended in the package, nor final, nor abstract, nor plain values."""
    classes = [node for path in MODULES for node in nodes_of(tree_of(path)) if isinstance(node, ast.ClassDef)]
    extended = {getattr(base, "id", getattr(base, "attr", "")) for node in classes for base in node.bases}
    values = {"Protocol", "TypedDict", "IntEnum", "NamedTuple"}
    return {
        node.name
        for node in classes
        if node.name not in extended
        and not any(
            mark in " ".join(map(ast.unparse, node.decorator_list)) for mark in ("final", "dataclass", "abstract")
        )
        and not {getattr(base, "id", "") for base in node.bases} & values
        and not any(keyword.arg == "total" for keyword in node.keywords)
    }


def test_concrete_classes_are_final():
    assert classes_without_final() == MEANT_TO_BE_EXTENDED


# ---- docs/architecture.md names files that are there, and every floor

TEXT = (PACKAGE.parent / "docs" / "architecture.md").read_text()


def test_every_path_and_every_name_in_the_diagrams_is_there():
    paths = set(re.findall(r"`([\w/]+(?:\.py|/))`", TEXT))
    assert len(paths) > 30
    assert [
        path for path in sorted(paths) if not (PACKAGE / path).exists() and not (PACKAGE.parent / path).exists()
    ] == []
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    for name in ("Fp8GatherShard", "MsampWeight", "LowPrecision", "Transposable", "wire_format"):
        assert name in TEXT
        assert re.search(rf"\b{name}\b", code), name


def test_every_room_stands_on_its_floor():
    drawn = TEXT.split("```")[1]
    floors = re.split(r"floor \d", drawn)[1:]
    rooms = [set(re.findall(r"(?:^|\s)(\w+)(?:/|\.py)(?=\s|$)", floor)) for floor in floors]
    assert rooms == FLOORS
