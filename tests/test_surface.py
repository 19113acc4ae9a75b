"""The frozen surface: public names, their options, the flags of the commands, the names of precisions.

`tests/surface.txt` lists it. A new entry needs its reason there (CONTRIBUTING.md, "Proof of value"):

    option FP8TorchAO(colour) | who asked, a user outside, with a link | what it costs | what showed its worth

An entry comes in for an entry that leaves. Of the names of precisions each word is an entry, with its endings.

`python -m tests.test_surface` prints the surface of this code, to copy lines from.

`tests/below_the_surface.txt` lists the files of the tests that import something else of the package, with the reason of
each room above its files. A module can be moved or renamed without a look at the other files.
"""

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_lowprec
from lightning_lowprec import callbacks, msamp
from lightning_lowprec.tools import cli
from tests.representatives import TABLE

FILE = Path(__file__).with_name("surface.txt")
OWN = "lightning_lowprec"
BELOW = FILE.with_name("below_the_surface.txt")
API_PAGE = Path(__file__).parents[1] / "docs" / "api.md"
FIRST_RELEASE = "# The surface of 0.2.0"
LATER = "# After 0.2.0: entry | who asked, with a link | what it costs | what showed its worth"


def public_objects() -> dict[str, Any]:
    """What a user imports: the lists of the package, and the objects of docs/api.md."""
    listed = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (lightning_lowprec, callbacks, msamp)
        for name in module.__all__
    }
    for path in re.findall(r"^::: (\S+)$", API_PAGE.read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        value = getattr(import_module(module), name)
        if not any(value is other for other in listed.values()):
            listed[path] = value
    return listed


def parameters(value: Any) -> list[str]:
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Warning)):
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, parameter in inspect.signature(value).parameters.items() if parameter.kind not in kinds]


def words(names: Iterable[str]) -> Iterator[str]:
    endings: dict[str, list[str]] = {}
    for name in sorted(names):
        word, _, ending = name.rpartition("-")
        if word in endings and ending != "te":
            endings[word].append(f" -{ending}")
        else:
            endings[name] = []
    yield from (word + "".join(its) for word, its in endings.items())


def surface() -> Iterator[str]:
    for path, value in public_objects().items():
        short = path.rpartition(".")[2]
        yield f"name {path}"
        yield from (f"option {short}({argument})" for argument in parameters(value))
    for command in cli.COMMANDS.keys() - {"fit"}:  # the flags of `fit` are Lightning's
        for cls in cli.COMMANDS[command][1:]:
            for action in cli.parser_of(command, cls)._actions:
                yield from (f"flag lowprec {command} {flag}" for flag in action.option_strings)
    yield from (f"precision {word}" for word in words(TABLE))


def frozen(text: str) -> dict[str, list[str]]:
    """The listed entries, each with its reasons; those of the first release have none."""
    first, later = text.removeprefix(FIRST_RELEASE).split(LATER)
    entries: dict[str, list[str]] = {line: [] for line in first.split("\n") if line}
    for line in filter(None, later.split("\n")):
        entry, *reasons = (part.strip() for part in line.split("|"))
        if len(list(filter(None, reasons))) != 3 or "https://" not in reasons[0]:
            raise ValueError(f"who asked (a link), what it costs, what showed its worth? {line!r}")
        entries[entry] = reasons
    return entries


def test_surface_is_the_listed_one():
    code, listed = set(surface()), set(frozen(FILE.read_text()))
    assert not code - listed, "new: write into tests/surface.txt who asked for it, what it costs, what showed its worth"
    assert not listed - code, "gone: take it from tests/surface.txt, and tell users in CHANGELOG.md"


DOORS = {
    OWN,
    f"{OWN}.conversion.backends",
    f"{OWN}.conversion.backends.Backend",
    f"{OWN}.conversion.backends.PrecisionName",
    f"{OWN}.tools.cli",
    f"{OWN}.tools.cli.main",
    f"{OWN}.tools.demo",
    f"{OWN}.tools.demo.ByteGPT",
    f"{OWN}.tools.demo.StdlibText",
}
"""The package, where a backend from outside is registered, the command `lowprec`, and its demo of docs/."""


def looks_below(path: Path) -> bool:
    """Return whether a file imports something of the package that is not of its surface."""
    listed = {entry.removeprefix("name ") for entry in frozen(FILE.read_text()) if entry.startswith("name ")}
    public = listed | {name.rpartition(".")[0] for name in listed} | DOORS
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return any(name not in public for name in imported if name.partition(".")[0] == OWN)


def test_the_files_that_look_below_the_surface_are_listed():
    tests = FILE.parent
    below = {str(path.relative_to(tests)) for path in tests.rglob("*.py") if looks_below(path)}
    listed = set(re.findall(r"^\S+\.py$", BELOW.read_text(), re.MULTILINE))
    assert not below - listed, "import it from `lightning_lowprec`, or ask the same of a Trainer, Fabric or a command"
    assert not listed - below, "take it from tests/below_the_surface.txt: the list gets shorter only"


if __name__ == "__main__":
    print(*sorted(set(surface())), sep="\n")
