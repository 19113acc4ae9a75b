"""Make command line options from the fields of a dataclass, so that names, defaults and help are written once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser


def add_fields(parser: ArgumentParser, cls: type, *, skip: Collection[str] = ()) -> None:
    """Add an option for every field of a dataclass; the help is the text of the field in the docstring.

    An option may be spelled with hyphens or with underscores. A list takes its values one after the other:
    ``--keep a b``. A path arrives as a string.

    Args:
        parser: gets the options.
        cls: the dataclass. Every field has a default.
        skip: fields that get no option.
    """
    helps = {param.arg_name: param.description or "" for param in parse_from_object(cls).params}
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.name not in skip:
            names = dict.fromkeys(f"--{name}" for name in (field.name.replace("_", "-"), field.name))
            text = " ".join(helps[field.name].split()).replace("``", "").removesuffix(".")
            parser.add_argument(*names, **_how(hints[field.name], field), help=text)


def _how(hint: Any, field: Field[Any]) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for one field."""
    default = field.default if field.default_factory is MISSING else field.default_factory()
    if hint is bool:
        return {"action": "store_true", "default": default}
    if Sequence in (get_origin(kind) for kind in (hint, *get_args(hint))):
        return {"nargs": "+", "type": str, "default": default, "metavar": "VALUE"}
    if get_origin(hint) is Literal:
        return {"type": hint, "default": default}
    if hint is Path:
        return {"type": str, "default": str(default), "metavar": "PATH"}
    return {"type": hint, "default": default, "metavar": "VALUE"}
