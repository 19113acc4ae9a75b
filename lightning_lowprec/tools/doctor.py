"""``lowprec doctor``, from a shell and from Python: the precisions that run on this machine, and why others do not."""

import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch

import lightning_lowprec_autoload as autoload
from lightning_lowprec import names as precisions
from lightning_lowprec.conversion import backends
from lightning_lowprec.conversion.backends import Backend
from lightning_lowprec.conversion.name_formats import in_words
from lightning_lowprec.extras import INSTALL, import_refusal, installed
from lightning_lowprec.hardware import architecture, bf16_refusal, caution, default_device, describe
from lightning_lowprec.names import validate_name
from lightning_lowprec.private import deepspeed, lightning, torchao, transformer_engine, transformers
from lightning_lowprec.private import torch as torch_names
from lightning_lowprec.runs_where import RECIPES, Architecture, Cell, RecipeKey, cell, instead, named
from lightning_lowprec.tools.output import WIDTH, dumps, folded, working

_BASELINE: Final = "float32 weights, half-precision compute: the baseline of the comparison"
_REMAINDER: Final = "weights of 2 bytes, float32 masters: 14 bytes per parameter with AdamW, not 16"
_CANDIDATES: Final[Sequence[tuple[str, str]]] = (
    ("mxfp8", "FP8 GEMMs with a scale per 32 values, which this GPU has in hardware"),
    ("fp8-hybrid", "FP8 GEMMs with one scale per tensor: pays on large linear layers"),
    ("fp8-hybrid-remainder", f"the same with bf16 weights: {_REMAINDER}"),
    (
        "fp8-rowwise-gw-hp",
        "FP8 GEMMs with one scale per row, weight gradients in bf16: less rounding than one scale per tensor",
    ),
    ("int8-mixed", "int8 GEMMs, which this GPU runs faster than bf16: pays on large linear layers"),
    ("bf16-remainder", _REMAINDER),
    ("bf16-8bit", "float32 masters in 2 bytes, moments of 8 bits: 8 bytes per parameter with AdamW, not 16"),
)
_WITHOUT_BF16: Final = (
    ("fp16-master", "fp16 weights and gradients with loss scaling, float32 masters in the optimizer"),
    ("32-true", "Lightning's float32: the reference for accuracy"),
)
_EMULATED: Final = (
    ("bf16-remainder", _REMAINDER),
    ("fp8-hybrid", "emulated here, slow: shows the numerics of FP8 before you rent a GPU"),
)
_WITHOUT_MASTERS: Final = ("bf16-true", "16-true")
_STUCK: Final = (
    "A norm weight that stays at exactly 1.0 is the sign. 'bf16-remainder' keeps such updates, and keeps what a model"
    " declares float32."
)
LIBRARIES = (torch_names, lightning, torchao, transformer_engine, transformers, deepspeed)
"""For each library, the file that knows which of the library's private names this package uses."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """The verdict on one precision."""

    name: str
    runs: bool
    emulated: bool = False
    """It runs on the arithmetic of another format: for tests, not for speed."""
    known: bool = True
    """Whether anybody has confirmed that it runs."""
    reason: str
    """How it runs; or why it does not run, and a remedy."""
    summary: str


class Recommended(NamedTuple):
    """One precision to try, and why in one line."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """What runs on one device."""

    facts: Mapping[str, Any]
    """Device, driver, versions and backends."""
    precisions: Sequence[Availability]

    @property
    def recommended(self) -> list[Recommended]:
        """The three precisions to try first, the baseline of a comparison before the others."""
        return advice(self.precisions, self.facts["bf16"])

    def __repr__(self) -> str:
        facts = self.facts
        width = max(len(row.name) for row in self.recommended)
        compare, run = commands(self.recommended)
        try_first = folded(f"    {row.name:<{width}}  {row.why}" for row in self.recommended)
        lines = [
            f"device    {facts['device']}",
            f"driver    {facts['driver'] or 'no NVIDIA driver'}",
            f"versions  {self._versions()}",
            f"names     {facts['names']}",
            *(f"backend   {title}: {status}" for title, status in facts["backends"].items()),
            *(f"warning   {warning}" for warning in self._warnings()),
        ]
        return "\n".join(
            [
                "Try first on this machine:",
                *try_first,
                *(f"    $ {line}" for line in (compare.replace(" --model", " \\\n          --model"), run)),
                "",
                *folded(lines),
                "",
                *_families(self.precisions),
                "",
                "`lowprec doctor --device sm_120` shows what runs on another architecture.",
            ]
        )

    def as_json(self) -> dict[str, object]:
        """Return facts, verdicts and recommendation."""
        return {
            **self.facts,
            "precisions": [asdict(verdict) for verdict in self.precisions],
            "recommended": [{"name": row.name, "why": row.why} for row in self.recommended],
            "commands": commands(self.recommended),
        }

    def _versions(self) -> str:
        numbers = {"python": self.facts["python"], **self.facts["versions"]}
        return ", ".join(f"{name} {number or '(not installed)'}" for name, number in numbers.items())

    def _warnings(self) -> list[str]:
        moved, broken = self.facts["moved"], self.facts["broken"]
        said = [f"the installed libraries are not all supported; they no longer have: {', '.join(moved)}"]
        return said * bool(moved) + [f"{name} is installed and does not import: {why}" for name, why in broken.items()]


def availability(name: str, device: torch.device) -> Availability:
    """Judge a name of the table: really import the packages that it needs, and ask the device."""
    summary = precisions.TABLE[name].summary
    try:
        plugin = precisions.create(name)
    except ImportError as error:
        return Availability(name=name, runs=False, reason=str(error), summary=summary)
    refusal = plugin.refusal(device)
    if refusal is not None:
        return Availability(name=name, runs=False, reason=refusal, summary=summary)
    emulated, recipe = bool(plugin.emulates(device)), plugin.hardware_recipe
    doubt = None if emulated or recipe is None else caution(recipe, device)
    reason = doubt or plugin.how(device)
    return Availability(name=name, runs=True, emulated=emulated, known=doubt is None, reason=reason, summary=summary)


def machine(device: torch.device) -> dict[str, Any]:
    """Return device, bf16, driver, versions, backends, private names that moved, and libraries that do not import."""
    moved, broken = _moved()
    return {
        "device": describe(device),
        "bf16": bf16_refusal(device) is None,
        "architecture": architecture(device).key,
        "hardware": cells_of(architecture(device)),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions(),
        "names": _names(),
        "backends": {backend.title: _status(backend) for backend in backends.registered()},
        "moved": moved,
        "broken": broken,
    }


def _moved() -> tuple[list[str], dict[str, str]]:
    """Return the private names that libraries no longer have; and libraries that do not import, with the error."""
    moved, broken = [], {}
    for library in LIBRARIES:
        try:
            moved += library.moved()
        except (ImportError, OSError, AttributeError, AssertionError, RuntimeError) as error:
            broken[library.__name__.rpartition(".")[2]] = f"{type(error).__name__}: {error}".splitlines()[0]
    return moved, broken


def versions() -> dict[str, str | None]:
    """Return the versions of this package and of its libraries, or None for a package that is not installed."""
    needed = [backend.distribution for backend in backends.registered() if backend.distribution is not None]
    return installed(
        ("lightning-lowprec", "torch", "lightning", "pytorch-lightning", *needed, "jsonargparse", "matplotlib")
    )


def _names() -> str:
    if autoload.installed_by_torch:
        return f"known without an import, in both packages of Lightning (`{autoload.SWITCH}=0` ends this)"
    return "known after `import lightning_lowprec`; torch did not call the entry point of this package"


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.partition("\n")[0].strip() or None if result.returncode == 0 else None


def _status(backend: Backend) -> str:
    if backend.module is None:
        return "needs nothing beside torch"
    library = backend.module.partition(".")[0]
    if find_spec(library) is None:
        return f"not installed: `{INSTALL.get(library, f'pip install {backend.distribution}')}`"
    refusal = import_refusal(backend.module, backend.title)
    return "imports" if refusal is None else refusal.splitlines()[0]


def doctor(device: torch.device | str | None = None) -> Diagnosis:
    """Say which precisions run on this machine, why the others do not, and which to try first: ``lowprec doctor``.

    ``print`` shows what the command prints. ``device`` is a torch device such as ``"cuda:1"``; None: the first GPU, or
    the CPU where there is no GPU.
    """
    device = default_device() if device is None else torch.device(device)
    with working("asking the backends"):
        verdicts = [availability(name, device) for name in precisions.TABLE]
        return Diagnosis(facts=machine(device), precisions=verdicts)


def run(args: Namespace) -> int:
    """Print the verdict on every name, on one name, or on an architecture; return 1 if the one does not run."""
    data, said, refused = _answer(args)
    if args.json:
        print(dumps(data))
    else:
        print(said, file=sys.stderr if refused else sys.stdout)
    return int(refused)


def _answer(args: Namespace) -> tuple[object, object, bool]:
    """Return the answer for JSON and for people, and whether it is that a precision does not run."""
    device = _device(args.device) if args.device else default_device()
    if isinstance(device, Architecture):  # by the table alone: packages and drivers of this machine say nothing
        return _by_the_table(args.name, device)
    if args.name is not None:
        return _one(args.name, device)
    diagnosis = doctor(device)
    return diagnosis.as_json(), diagnosis, False


def _device(name: str) -> torch.device | Architecture:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        try:
            return named(name)
        except ValueError as unknown:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"`device={name!r}` is not available here: {reason} As an architecture: {unknown}"
            ) from error


def _one(name: str, device: torch.device) -> tuple[object, str, bool]:
    validate_name(name)
    if name not in precisions.TABLE:
        said = f"{name} is Lightning's own precision; lightning_lowprec has nothing to check."
        if name in _WITHOUT_MASTERS:
            said += f"\nIts weights have no masters: small updates are rounded away. {_STUCK}"
        return {"name": name, "runs": True, "reason": "Lightning's own precision"}, said, False
    with working(f"asking whether {name} runs"):
        verdict = availability(name, device)
    said = f"{verdict.name}  {word(verdict):<9}  {verdict.summary}\n{verdict.reason}"
    return asdict(verdict), said, not verdict.runs


def advice(verdicts: Sequence[Availability], bf16: bool) -> list[Recommended]:
    """Return three names to try first, the baseline before the others."""
    emulated = {verdict.name for verdict in verdicts if verdict.emulated}
    runs = {verdict.name for verdict in verdicts if verdict.runs and verdict.known}
    others: Sequence[tuple[str, str]]
    if not bf16:
        others = _WITHOUT_BF16
    elif "fp8-hybrid" in emulated:
        others = _EMULATED
    else:
        others = tuple((name, why) for name, why in _CANDIDATES if name in runs)[:2]
    return [Recommended(*row) for row in (("half-auto", _BASELINE), *others)]


def commands(recommended: Sequence[Recommended]) -> list[str]:
    """Return the command that compares the precisions, and the one that trains with the second of them."""
    names = ",".join(row.name for row in recommended)
    return [
        f"lowprec compare --precisions {names} --model my.Model --data my.Data",
        f"lowprec run --precision={recommended[1].name} train.py",
    ]


def _families(verdicts: Sequence[Availability]) -> list[str]:
    """Return for each family, answer and reason the names and then the reason: half precision, then each backend."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for verdict in verdicts:
        backend = precisions.TABLE[verdict.name].backend
        family = "half precision" if backend is None else backends.get(backend).title
        rows.setdefault((family, word(verdict), verdict.reason), []).append(verdict.name)
    width = max(len(family) for family, *_ in rows)
    lines = []
    for (family, answer, reason), names in rows.items():
        names_and_reason = [f"{family:<{width}}  {answer:<9}  {in_words(names)}", reason]
        short = ": ".join(names_and_reason)
        lines += [short] if len(short) <= WIDTH else folded("\n    ".join(names_and_reason).split("\n"))
    return lines


def word(answer: Availability | Cell) -> str:
    """Return the answer in a word: yes, emulated, no or not known."""
    if answer.runs is None or (isinstance(answer, Availability) and not answer.known):
        return "not known"
    return "no" if not answer.runs else "emulated" if answer.emulated else "yes"


# ---- another architecture, by the table of what runs where


def cells_of(architecture: Architecture) -> dict[str, object]:
    """Return the cells of an architecture by recipe."""
    return {recipe: asdict(cell(recipe, architecture)) for recipe in RECIPES}


def _by_the_table(name: str | None, architecture: Architecture) -> tuple[object, str, bool]:
    if name is None:
        return cells_of(architecture), "\n".join(_column(architecture)), False
    recipe = _recipe_of(name)
    answer = cell(recipe, architecture)
    said = f"{name} on {architecture.key}: {word(answer)}\n"
    said += f"{architecture.title} {answer.reason or 'runs'} [{answer.source}]."
    if answer.runs is False:
        said += f" Use {instead(recipe, architecture)}."
    return asdict(answer), said, answer.runs is False


def _column(architecture: Architecture) -> list[str]:
    """Return a line per answer and reason of an architecture."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for recipe in RECIPES:
        answer = cell(recipe, architecture)
        why = f" ({answer.reason})" if answer.reason else ""
        grouped.setdefault((word(answer), f"{why} [{answer.source}]"), []).append(recipe)
    lines = [f"    {said:<9}  {', '.join(recipes)}{why}" for (said, why), recipes in grouped.items()]
    return folded([f"Recipes on {architecture.key}, {architecture.title}:", *lines])


def _recipe_of(name: str) -> RecipeKey:
    if name in RECIPES:
        return name
    if name not in precisions.TABLE:
        raise ValueError(f"{precisions.unknown_name(name, ())} Recipes are allowed too: {', '.join(RECIPES)}.")
    of_name = precisions.TABLE[name].hardware_recipe
    if of_name is None:
        raise ValueError(f"`precision={name!r}` has no row in the table of what runs where; its backend gives none.")
    return of_name
