"""Checks of arguments, with one wording: the field, the value that was given, the values that are allowed.

The type hint of an option says what the option takes. :func:`check_fields` checks a dataclass by its hints, and
:func:`check_types` checks any other values:

* ``bool`` takes True and False only: the string ``"False"`` would count as true;
* ``int`` takes integers, but no bool;
* ``float`` takes finite numbers, but no bool;
* ``Annotated[int, at_least(1)]`` adds a :class:`Rule`, whose words stand in the message.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from lightning_lowprec.gone import VALUES, gone
from lightning_lowprec.other_stacks import nearest

C = TypeVar("C", bound=type)


def abstract(cls: C) -> C:
    """Let nobody make an object of a base class of ours, so that LightningCLI does not list the class either."""
    cls.__abstractmethods__ = frozenset({"__init__"})  # type: ignore[attr-defined]  # subclasses do not inherit this
    return cls


@dataclass(frozen=True)
class Rule:
    """A rule for values of an annotated type: ``Annotated[int, Rule("an even number", lambda n: n % 2 == 0)]``."""

    words: str
    """The allowed values, for the message."""
    holds: Callable[[Any], bool] = lambda value: True
    """Whether a value of the type keeps the rule."""


def at_least(bound: int) -> Rule:
    """Return the rule for integers of at least ``bound``."""
    return Rule(f"an integer of at least {bound}", lambda value: bool(value >= bound))


Count = Annotated[int, at_least(1)]
Size = Annotated[int, at_least(0)]
CompileOptions = Annotated[Mapping[str, Any], Rule("a mapping of torch.compile options")]

_WORDS: Final[dict[object, str]] = {
    NoneType: "None",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    Sequence: "a list",
    Mapping: "a mapping",
    Callable: "a function",
}


def check_choice(field: str, value: object, allowed: Iterable[object]) -> None:
    """Raise a ValueError if ``value`` is not one of ``allowed``, for example of the ``get_args`` of a ``Literal``."""
    choices = list(allowed)
    if value not in choices:
        hint = f" {answer}" if (answer := gone(str(value), VALUES.get(field, {}))) else ""
        raise ValueError(f"`{field}={value!r}` is not valid; expected one of: {', '.join(map(str, choices))}.{hint}")


def check_integer(field: str, value: object, *, least: int) -> None:
    """Raise a ValueError if ``value`` is not an integer of at least ``least``; a bool is no integer here."""
    check_types({field: value}, {field: Annotated[int, at_least(least)]})


def check_types(values: Mapping[str, object], hints: Mapping[str, object]) -> None:
    """Raise a ValueError for the first value that its type hint does not allow; every name has a hint."""
    for field, value in values.items():
        if not allows(hints[field], value):
            word = getattr(value, "name", value)  # an enum of another stack, such as Format.HYBRID
            near = nearest(word, _choices(hints[field])) if isinstance(word, str) else None
            hint = "" if near is None else f" Did you mean {near!r}?"
            if field == "wrap" and not hint and isinstance(value, str):
                hint = " Write the class itself, in a list: `wrap=[LlamaDecoderLayer]`."
            hint = f" {answer}" if (answer := gone(str(value), VALUES.get(field, {}))) else hint
            raise ValueError(f"`{field}={value!r}` is not valid; expected {_expected(hints[field])}.{hint}")


def check_fields(instance: object) -> None:
    """Raise a ValueError for the first field of a dataclass whose value the field's type hint does not allow."""
    cls: Any = type(instance)
    check_types({field.name: getattr(instance, field.name) for field in fields(cls)}, hints_of(cls))


@cache
def hints_of(function_or_class: object) -> dict[str, Any]:
    """Return the type hints by name, with the rules of ``Annotated``."""
    return get_type_hints(function_or_class, include_extras=True)


def allows(hint: Any, value: Any) -> bool:
    """Return whether a type hint allows a value."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return allows(args[0], value) and all(rule.holds(value) for rule in args[1:])
    if origin in (Union, UnionType):
        return any(allows(arm, value) for arm in args)
    if origin is Literal:
        return any(isinstance(value, type(choice)) and value == choice for choice in args)
    if hint in (int, float):
        is_number = isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    if origin is type:
        return isinstance(value, type) and issubclass(value, args[0])
    if origin in (Sequence, set):
        return isinstance(value, origin) and not isinstance(value, str) and all(allows(args[0], v) for v in value)
    return callable(value) if origin is Callable else isinstance(value, origin or hint)


def _expected(hint: object) -> str:
    arms, choices = _arms(hint), _choices(hint)
    none = [None] if NoneType in arms else []
    if all(arm is NoneType or get_origin(arm) is Literal for arm in arms):
        return f"one of: {', '.join(map(str, [*none, *choices]))}"
    words = list(dict.fromkeys([*map(str, none), *(w for arm in arms if arm is not NoneType for w in _words(arm))]))
    return " or ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


def _arms(hint: object) -> Collection[object]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _choices(hint: object) -> list[object]:
    bare = [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in _arms(hint)]
    return [choice for arm in bare if get_origin(arm) is Literal for choice in get_args(arm)]


def _words(hint: object) -> list[str]:
    origin = get_origin(hint)
    if origin is Annotated:
        return [get_args(hint)[-1].words]
    if origin is Literal:
        return [repr(choice) for choice in get_args(hint)]
    if hint is bool:
        return ["True", "False"]
    return [_WORDS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")]
