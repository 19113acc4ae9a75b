"""Options that several plugins share: each is defined, documented and checked once.

A group of options is a frozen dataclass; its docstring describes every field under ``Args:``. The arguments of a
constructor are a dataclass too, which derives from groups:

    @shows()
    class Plugin:
        @takes(PluginOptions)
        def __init__(self, options: PluginOptions) -> None:
            self.layers = take(LayerOptions, options)

    Plugin("rowwise", keep=["lm_head"])

Type checkers and editors read the dataclass. :func:`shows` writes its fields into the constructor's signature and into
the class docstring, which is where ``help()`` and jsonargparse (LightningCLI, ``--help``) look.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from typing import Annotated, Any, Concatenate, Final, Literal, ParamSpec, TypeVar, get_type_hints

from lightning_lowprec.checks import Rule, Size, check_fields, check_types, hints_of
from lightning_lowprec.other_stacks import unknown_option

Frozen = Literal["convert", "keep", "codes"]
Names = Annotated[Sequence[str], Rule("a list of fqns or patterns, e.g. ['lm_head']")]
Layers = Annotated[Size, Rule("a number of layers, 0 or more")]
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
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


def take(group: type[T], options: object) -> T:
    """Return the part of ``options``, a dataclass that derives from ``group``, which are the fields of ``group``."""
    return group(**{field.name: getattr(options, field.name) for field in fields(group)})  # type: ignore[arg-type]


def takes(options: Callable[P, T]) -> Callable[[Callable[[S, T], None]], Callable[Concatenate[S, P], None]]:
    """Let a constructor take the fields of the dataclass ``options`` as arguments; it gets the dataclass."""

    def decorate(init: Callable[[S, T], None]) -> Callable[Concatenate[S, P], None]:
        @wraps(init)
        def taking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, options(*args, **kwargs))

        vars(taking)["options"] = options
        return taking

    return decorate


def called_with(options: Callable[P, T]) -> Callable[[Callable[[T], R]], Callable[P, R]]:
    """Let a function be called with the fields of the dataclass ``options``; it gets the dataclass."""

    def decorate(function: Callable[[T], R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            return function(options(*args, **kwargs))

        own = [p for p in _parameters(options) if p.name in inspect.get_annotations(options)]
        vars(called)["__signature__"] = inspect.Signature(
            [*own, inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]
        )
        return called

    return decorate


def _parameters(options: Any) -> list[inspect.Parameter]:
    """Return the fields of a dataclass as parameters: its own first, then those of its groups."""
    hints, by_name = get_type_hints(options), {field.name: field for field in fields(options)}
    names = [name for cls in options.__mro__[:-1] for name in inspect.get_annotations(cls)]
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY if by_name[name].kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if by_name[name].default is MISSING else by_name[name].default,
            annotation=hints[name],
        )
        for name in dict.fromkeys(names)
    ]
    return sorted(parameters, key=lambda parameter: parameter.kind)


def shows() -> Callable[[Class], Class]:
    """Show the options that a constructor :func:`takes` in signature and docstring of its class, and check them.

    The constructor refuses every unknown keyword, and a value that the type hint of a parameter does not allow.
    """

    def decorate(cls: Class) -> Class:
        init: Any = cls.__init__  # type: ignore[misc]
        options = getattr(init, "options", None)
        itself, *parameters = inspect.signature(init).parameters.values()
        if options is not None:
            parameters = _parameters(options)
        else:
            hints = get_type_hints(init)
            parameters = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters]
        allowed = {p.name for p in parameters}
        positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        types = hints_of(init if options is None else options)

        def checked(self: Any, *args: object, **kwargs: object) -> None:
            for name in kwargs.keys() - allowed:
                raise unknown_option(f"{cls.__name__}.__init__", name, allowed)
            check_types({**dict(zip(positional, args, strict=False)), **kwargs}, types)
            init(self, *args, **kwargs)

        checked.__signature__ = inspect.Signature([itself, *parameters], return_annotation=None)  # type: ignore[attr-defined]
        checked.__doc__, checked.__name__, checked.__qualname__ = init.__doc__, init.__name__, init.__qualname__
        checked.__module__ = init.__module__
        cls.__init__ = checked  # type: ignore[misc]
        if cls.__doc__ is not None:  # python -OO has none
            cls.__doc__ = _described(cls.__doc__, () if options is None else options.__mro__[1:])
        return cls

    return decorate


def _described(doc: str, groups: Iterable[type[object]]) -> str:
    """Return a docstring with the entries under ``Args:`` of the groups'."""
    head, raises, tail = inspect.cleandoc(doc).partition(_RAISES)
    shared = ((inspect.getdoc(group) or "").partition(_ARGS)[2] for group in groups)
    entries = [entry for text in shared for entry in re.split(r"\n(?= {4}\S)", text)]
    return "\n".join([head, *filter(None, entries)]) + raises + tail
