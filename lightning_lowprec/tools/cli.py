"""The ``lowprec`` command: its guide, its exit codes, and the parser and the start of every command.

This file imports neither torch nor Lightning, and the module of a command is imported when the arguments are known to
be right. So the answers to ``--help``, to a wrong option and to an unknown precision come at once.
"""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pickle import UnpicklingError
from typing import Any, Final, Never, get_type_hints

from jsonargparse import ArgumentParser

from lightning_lowprec.conversion.options import take
from lightning_lowprec.gone import BARE_PRECISIONS, FLAGS, VALUES, WITHOUT_FORMAT, gone
from lightning_lowprec.gone import COMMANDS as GONE_COMMANDS
from lightning_lowprec.names import validate_name
from lightning_lowprec.other_stacks import pointer
from lightning_lowprec.tools import options
from lightning_lowprec.tools.class_path import import_from_working_folder, load_package, module_paths
from lightning_lowprec.tools.output import folded, format_table
from lightning_lowprec.version import __version__

COMMANDS: Final[Mapping[str, tuple[Any, ...]]] = {
    "doctor": ("doctor", options.Doctor),
    "plan": ("planning.command", options.Plan),
    "compare": ("compare.runner", options.Compare),
    "monitor": ("monitor", options.Monitor),
    "export": ("export", options.Export),
    "fit": ("",),
    "run": ("launcher", options.Run),
}
"""The module whose ``run`` takes the arguments of a command, and its options."""
GUIDE: Final = (
    ("Which precisions run on this machine?", "lowprec doctor"),
    ("Does one precision run here?", "lowprec doctor --for fp8-hybrid"),
    ("Which layers of my model convert?", "lowprec plan my.Model"),
    ("Which precisions fit into my GPU?", "lowprec plan my.Model --fits H200"),
    ("Does a precision cost me loss?", "lowprec compare --model my.Model --data my.Data"),
    ("Train a LightningModule", "lowprec fit --model my.Model --trainer.precision fp8-hybrid"),
    ("Train by a script of my own", "lowprec run --precision fp8-hybrid train.py"),
    ("Which layers does FP8 serve worst?", "lowprec monitor RUN"),
    ("Serve a checkpoint", "lowprec export last.ckpt served --format hf --model my.Model"),
)
EXIT_CODES: Final = {
    0: "the command has done its work, and the answer is yes",
    1: "the answer is no: the precision does not run here, nothing converts or fits, a comparison or check failed;"
    " or an error of your own code under fit and run",
    2: "wrong arguments, or an input that is missing or cannot be read; nothing was changed",
    130: "stopped by Ctrl-C",
    141: "the program that reads the output has ended, such as head",
}
"""What the exit status of a command means. ``run`` hands on the exit status of the script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = argv[:1] == ["--debug"]
    command, arguments = "".join(argv[debug : debug + 1]), argv[debug + 1 :]
    if command not in COMMANDS:
        return _answer(command)
    if command != "run" and "--debug" in arguments:  # arguments of `run` may be those of the script
        arguments.remove("--debug")
        debug = True
    in_model = False
    import_from_working_folder()
    try:
        args = parse(command, arguments)
        in_model = command == "fit"
        run = _fit if in_model else import_module(f"lightning_lowprec.tools.{COMMANDS[command][0]}").run
        status: int = run(args)
        sys.stdout.flush()  # here, where a reader that has ended is noticed
        return status
    except KeyboardInterrupt:
        if debug:
            raise
        print(f"\nlowprec {command}: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 141
    except (ValueError, ImportError, OSError, UnpicklingError) as error:
        if debug or (in_model and not isinstance(error, OSError)):
            raise  # the error may come from the user's own model
        print(f"lowprec {command}: error: {error}", file=sys.stderr)
        print(f"`lowprec --debug {command} ...` shows the traceback.", file=sys.stderr)
        return 2


def _answer(word: str) -> int:
    """Print the guide or the help; a command that has left, or is misspelt, is answered by what to write."""
    if word == "--version":
        print(__version__)
    elif word in ("", "-h", "--help"):
        print(f"lowprec {__version__}: low-precision training for Lightning and Fabric\n")
        print(*(f"  {line}" for line in format_table(GUIDE)), "", sep="\n")
        if word:
            codes = folded(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())
            print("exit codes:", *codes, "  `lowprec run` ends with the exit code of the script.\n", sep="\n")
        print("`lowprec --help` lists exit codes, `lowprec COMMAND --help` the options of a command.")
    else:
        answer = gone(word.partition("=")[0], {**GONE_COMMANDS, **FLAGS})
        answer = answer or f"{word!r} is no command. {pointer(word, {}, COMMANDS)}"
        print(f"lowprec: error: {answer}", file=sys.stderr)
        return 2
    return 0


def _fit(args: list[str]) -> int:
    """Run stock LightningCLI, whose warning that arguments are given twice is about this function and not the user."""
    from lightning_lowprec.private.either import LightningCLI

    warnings.filterwarnings("ignore", message="LightningCLI's args parameter is intended to run from within Python")
    LightningCLI(args=["fit", *args], parser_kwargs={"prog": "lowprec"})
    return 0


def parse(command: str, argv: Sequence[str]) -> Any:
    """Return the arguments of a command; a precision that is unknown, or a value that does not fit, is a ValueError."""
    if command == "fit":
        load_package()
        return module_paths(argv)
    if command != "run":  # the arguments of a script may have any form; the names of options are those of fields
        argv = [re.sub(r"^--[\w-]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in argv]
    words = [word.partition("=")[0] for word in argv]
    for flag in words:
        if answer := gone(f"{command} {flag}", FLAGS):
            raise ValueError(f"`{flag}` is not valid: {answer}")
    cls = COMMANDS[command][1]
    args = parser_of(command, cls).parse_args(argv)
    names = [getattr(args, "precision", None)]
    if command == "compare":
        names = args.precisions = [name.strip() for name in args.precisions.split(",")]
    elif command == "doctor":  # with --device, recipes are names too, which the command judges
        names = [] if args.device else [args.name]
    for name in [name for name in names if name is not None]:
        validate_name(name)
    if group := getattr(cls, "group", None):
        setattr(args, group[0], take(group[1], args))
    return args


def parser_of(command: str, cls: Any) -> ArgumentParser:
    """Return a parser with the fields of ``cls``, and of its group, as options."""
    description = " ".join((inspect.getdoc(cls) or "").split())
    parser = ArgumentParser(prog=f"lowprec {command}", description=description, allow_abbrev=False)
    _, group = getattr(cls, "group", ("", cls))
    described = dict(
        re.findall(r"^ {4}(\w+): ((?:.|\n {8})+)", (inspect.getdoc(group) or "").replace("``", "`"), flags=re.M)
    )
    hints = get_type_hints(group) | get_type_hints(cls)
    own = {option.name: option for option in fields(cls)}
    known = []
    for name, option in (own | {option.name: option for option in fields(group) if option.name not in own}).items():
        default = option.default if option.default_factory is MISSING else option.default_factory()
        how: dict[str, Any] = {"help": described.get(name), "type": hints[name], "default": default, **option.metadata}
        flag = how.pop("flag", name if default is MISSING else f"--{name}")
        if flag.startswith("--"):
            how.update(dest=name, required=default is MISSING)
        if default is MISSING:
            del how["default"]
        if how["type"] is bool:
            how["action"] = "store_true"
            del how["type"]
        elif how["type"] in (options.Names, options.Names | None):
            how = {"metavar": "NAME", **how, "type": str, "nargs": "+"}
        parser.add_argument(*sorted({flag, flag.replace("_", "-") if command == "run" else flag}), **how)
        known.append(flag)
    parser.error = partial(_with_nearest, known, parser.error)  # type: ignore[method-assign]
    return parser


def _with_nearest(known: list[str], original: Callable[..., Never], message: str, *args: Any, **kwargs: Any) -> Never:
    """Say which option was meant that the parser does not know, and what is possible in place of a wrong choice."""
    unknown = re.search(r"nrecognized arguments: (--[\w-]+)", message)
    hint = pointer(unknown[1], {}, known) if unknown else ""
    if wrong := re.search(r'Parser key "(\w+)":\s+Expected a typing\.Literal\[(.*)\]\. Got value: (.*)', message):
        field, choices, value = wrong.groups()
        message = f"`{field}={value!r}` is not valid; expected one of: {choices}"
        hint = gone(value, VALUES.get(field, {})) or pointer(value, {}, re.findall(r"'([^']+)'", choices))
    elif "argument --precisions: expected one argument" in message:
        hint = BARE_PRECISIONS
    elif re.search(r"arguments are required: .*\bformat\b", message):
        hint = WITHOUT_FORMAT
    original(". ".join(filter(None, [message.rstrip(), hint])), *args, **kwargs)


if __name__ == "__main__":
    sys.exit(main())
