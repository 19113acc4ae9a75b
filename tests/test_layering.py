"""Imports run down the floors only; private names of Lightning stay where they belong; files stay small."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_lowprec"
FLOORS = [
    {"formats", "scaling", "hardware", "extras"},
    {"layers", "optim", "distributed"},
    {"plugins", "strategies", "callbacks", "precisions", "registration", "strategy_support", "recipes", "availability"},
    {"cli", "compare", "demo", "planning", "export"},
]
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names}
MODULES = sorted(PACKAGE.rglob("*.py"))
OWN = "lightning_lowprec"


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


def upward(part: str, tree: ast.AST) -> set[str]:
    """The imports of our own that lie above the floor of `part`."""
    ours = {name.split(".")[1] for name in imported(tree) if name.startswith(OWN + ".")}
    return {name for name in ours if FLOOR.get(name, FLOOR[part]) > FLOOR[part]}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_down(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the public names and one call
    tree = ast.parse(path.read_text())
    assert upward(part, tree) == set()
    if FLOOR[part] < 2:
        assert not {name for name in imported(tree) if name.split(".")[0] == "lightning"}, "no Lightning below floor 2"
    if FLOOR[part] == 0:
        ours = {name for name in imported(tree) if name.startswith(OWN)}
        assert all(name.startswith(f"{OWN}.formats") for name in ours), "floor 0 stands alone, on the formats"


def test_the_layering_test_can_fail():
    assert upward("layers", ast.parse("from lightning_lowprec.plugins import HalfMixed")) == {"plugins"}
    assert upward("plugins", ast.parse("def f():\n    import lightning_lowprec.cli.main")) == {"cli"}
    assert upward("cli", ast.parse("from lightning_lowprec.layers import plan")) == set()


def private_lightning(tree: ast.AST) -> set[str]:
    parts = {name for name in imported(tree) if name.split(".")[0] == "lightning"}
    return {name for name in parts if any(part.startswith("_") for part in name.split("."))}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_of_lightning_are_imported_by_registration_only(path):
    if path.name != "registration.py":
        assert private_lightning(ast.parse(path.read_text())) == set()
    assert private_lightning(ast.parse("from lightning.fabric.connector import _Connector"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
