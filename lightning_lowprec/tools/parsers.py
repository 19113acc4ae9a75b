"""One parser for every command but ``fit``, whose options are those of LightningCLI.

This file imports no torch, and the module of a command is imported when the arguments are known to be right. So the
answers to ``--help``, to a wrong option and to an unknown precision come at once.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from typing import Any, Final, Never

from jsonargparse import ArgumentParser

from lightning_lowprec.conversion.options import LayerOptions, take
from lightning_lowprec.gone import FLAGS, gone
from lightning_lowprec.names import validate_name
from lightning_lowprec.other_stacks import pointer
from lightning_lowprec.tools import options
from lightning_lowprec.tools.compare.spec import CompareSpec

COMMANDS: Final[Mapping[str, tuple[str, Any, Any]]] = {
    "doctor": ("doctor", options.Doctor, None),
    "plan": ("planning.command", options.Plan, None),
    "compare": ("compare.runner", options.Compare, None),
    "monitor": ("monitor", options.Monitor, None),
    "export": ("export", options.Export, options.ExportFolder),
    "fit": ("", options.Fit, None),
    "run": ("launcher", options.Run, None),
}
"""The module whose ``run`` takes the arguments of a command, its options, and its options with ``--format``."""


def parse(command: str, argv: Sequence[str]) -> Any:
    """Return the arguments of a command; a precision that is unknown, or a value that does not fit, is a ValueError."""
    words = [argument.partition("=")[0] for argument in argv]
    if command != "run":  # the arguments of a script may have any form; jsonargparse names options after fields
        words = [re.sub(r"(?<=\w)-", "_", word) if word.startswith("--") else word for word in words]
        argv = [word + argument[len(word) :] for word, argument in zip(words, argv, strict=True)]
        for flag in words:
            if answer := gone(f"{command} {flag}", FLAGS):
                raise ValueError(f"`{flag}` is not valid: {answer}")
    for_servers = command == "export" and "--format" in words
    args = parsers(command)[for_servers].parse_args(argv)
    for name in _precisions(command, args):
        validate_name(name)
    if command == "compare":
        args.spec = take(CompareSpec, args)
    if hasattr(args, "frozen"):
        args.layers = take(LayerOptions, args)
    return args


def _precisions(command: str, args: Any) -> list[str]:
    """Return the precisions that the arguments name; ``doctor --device`` takes recipes too, and judges them itself."""
    if command == "compare":
        args.precisions = [name.strip() for name in args.precisions.split(",")]
        return list(args.precisions)
    precision = getattr(args, "precision", None)
    if command == "doctor" and args.device is None and not args.report and not args.all:
        precision = args.name
    return [] if precision is None else [precision]


def parsers(command: str) -> list[ArgumentParser]:
    """Return the parser of a command; of ``export`` those without and with ``--format``."""
    return [_parser(command, cls) for cls in COMMANDS[command][1:] if cls is not None]


def _parser(command: str, cls: Any) -> ArgumentParser:
    parser = ArgumentParser(prog=f"lowprec {command}", description=" ".join((inspect.getdoc(cls) or "").split()))
    for option in fields(cls):
        how: dict[str, Any] = {"help": option.metadata["help"], "type": option.type, "default": option.default}
        flag = f"--{option.name}"
        if option.default is MISSING:
            del how["default"]
            flag = option.name
        if option.type is bool:
            del how["type"], how["default"]
            how["action"] = "store_true"
        elif option.type in (options.Names, options.Names | None):
            how.update(type=str, nargs="+", metavar="NAME")
        how.update(option.metadata)
        flag = how.pop("flag", flag)
        if flag.startswith("--"):
            how["dest"] = option.name
            how["required"] = option.default is MISSING
        flags = [flag, flag.replace("_", "-")] if command == "run" and "_" in flag else [flag]
        parser.add_argument(*flags, **how)
    if cls.group is not None:
        apart = {field.name for field in fields(cls)} & {field.name for field in fields(cls.group)}
        parser.add_class_arguments(cls.group, as_group=False, skip=apart)
    known = [f"--{field.name}" for group in (cls, cls.group) if group is not None for field in fields(group)]
    parser.error = partial(_with_nearest, known + ["--for"] * (command == "doctor"), parser.error)  # type: ignore[method-assign]
    return parser


def _with_nearest(known: list[str], original: Callable[..., Never], message: str, *args: Any, **kwargs: Any) -> Never:
    """Say which option was meant, where the parser says that it does not know one."""
    unknown = re.search(r"nrecognized arguments: (--[\w-]+)", message)
    hint = pointer(unknown[1], {}, known) if unknown else ""
    original(". ".join(filter(None, [message.rstrip(), hint])), *args, **kwargs)
