"""Options that several plugins share: each is defined, documented and checked once.

A group of options is a frozen dataclass; its docstring describes every field under ``Args:``. A ``TypedDict`` with the
same names and types follows each dataclass, for type checkers and editors. A constructor takes the groups by keyword:

    @shows(LayerOptions)
    class Plugin:
        def __init__(self, recipe: str = "tensorwise", **options: Unpack[LayerChoices]) -> None:
            self.layers = take(LayerOptions, options)

:func:`shows` writes the fields into the constructor's signature and into the class docstring, which is where ``help()``
and jsonargparse (LightningCLI, ``--help``) look.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, get_type_hints

from lightning_lowprec.checks import Rule, Size, check_fields, check_types, hints_of
from lightning_lowprec.other_stacks import unknown_option

Frozen = Literal["convert", "keep", "codes"]
Names = Annotated[Sequence[str], Rule("a list of fqns or patterns, e.g. ['lm_head']")]
Layers = Annotated[Size, Rule("a number of layers, 0 or more")]
T = TypeVar("T")
Class = TypeVar("Class", bound=type)
_ARGS: Final = "Args:\n"
_RAISES: Final = "\n\nRaises:\n"


class Group:
    """Base of the groups: every field is checked, and nothing is changed."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class LayerOptions(Group):
    """Choose the Linear layers that convert, beside the rules of :mod:`~lightning_lowprec.conversion.selection`.

    Args:
        keep: Linears that stay in high precision, beside output heads, routers and LoRA adapters: names of layers,
            parts of names, or patterns.
        only: if given, only these Linears convert, and no built-in rule applies.
        first_last_layers_bf16: keep the first ``num_layers_at_start_in_bf16`` and the last
            ``num_layers_at_end_in_bf16`` blocks of every stack of blocks in high precision.
        num_layers_at_start_in_bf16: number of blocks at the start, with ``first_last_layers_bf16``.
        num_layers_at_end_in_bf16: number of blocks at the end, with ``first_last_layers_bf16``.
        frozen: ``"keep"`` leaves Linears whose weight does not train in high precision; ``"convert"`` converts them;
            ``"codes"`` (``FP8TorchAO``, tensorwise and block) also stores these weights as codes and scales, 1 byte per
            parameter, without the values from before.
    """

    keep: Names = ()
    only: Names | None = None
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: Layers = 1
    num_layers_at_end_in_bf16: Layers = 1
    frozen: Frozen = "convert"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in () if self.first_last_layers_bf16 else ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            if (number := getattr(self, name)) > 1:
                raise ValueError(f"`{name}={number}` keeps no block without `first_last_layers_bf16=True`; write both.")


class LayerChoices(TypedDict, total=False):
    """The fields of :class:`LayerOptions`, for type checkers."""

    keep: Sequence[str]
    only: Sequence[str] | None
    first_last_layers_bf16: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    frozen: Frozen


def take(group: type[T], options: Any) -> T:
    """Return an instance of the dataclass ``group``, made from the ``options`` that are its fields."""
    names = {field.name for field in fields(group)}  # type: ignore[arg-type]
    return group(**{name: value for name, value in options.items() if name in names})


def shows(*groups: type[Any], without: Collection[str] = ()) -> Callable[[Class], Class]:
    """Show the fields of option groups in a class's constructor and docstring, in place of ``**options``.

    The constructor then refuses every other keyword, as a constructor with written-out parameters does, and a value
    that the type hint of a parameter does not allow (see :mod:`~lightning_lowprec.checks`). ``without`` are fields that
    the class does not take.
    """

    def decorate(cls: Class) -> Class:
        init: Any = cls.__init__  # type: ignore[misc]
        direct = [p for p in inspect.signature(init).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        hints = get_type_hints(init)
        direct = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in direct]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=hint)
            for group in groups
            for name, hint in get_type_hints(group).items()
            if name not in without
        ]
        allowed = {p.name for p in (*direct, *shared)}
        positional = [p.name for p in direct if p.kind is not inspect.Parameter.KEYWORD_ONLY][1:]  # without `self`
        types = {name: hint for group in (*groups, init) for name, hint in hints_of(group).items() if name in allowed}

        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - allowed:
                raise unknown_option(f"{cls.__name__}.__init__", name, allowed)
            check_types({**dict(zip(positional, args, strict=False)), **kwargs}, types)
            init(self, *args, **kwargs)

        checked.__signature__ = inspect.Signature([*direct, *shared], return_annotation=None)  # type: ignore[attr-defined]
        checked.__doc__, checked.__name__, checked.__qualname__ = init.__doc__, init.__name__, init.__qualname__
        checked.__module__ = init.__module__
        cls.__init__ = checked  # type: ignore[misc]
        if cls.__doc__ is not None:  # python -OO has none
            cls.__doc__ = _described(cls.__doc__, groups, without)
        return cls

    return decorate


def _described(doc: str, groups: Iterable[type[Any]], without: Collection[str]) -> str:
    """Return a docstring with the entries under ``Args:`` of the groups', except those of the fields in ``without``."""
    head, raises, tail = inspect.cleandoc(doc).partition(_RAISES)
    shared = ((inspect.getdoc(group) or "").partition(_ARGS)[2] for group in groups)
    entries = [entry for text in shared for entry in re.split(r"\n(?= {4}\S)", text)]
    left = [entry for entry in entries if entry.partition(":")[0].strip() not in without]
    return "\n".join([head, *left]) + raises + tail
