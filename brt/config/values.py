"""Functions that check the types of values that users write, and that suggest a known name when a
name is unknown.
"""

import difflib
import math
import typing
from collections.abc import Iterable
from typing import Any, Literal

from brt.errors import ConfigError


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'NAME'?" with the most similar known name; "" if none is similar."""
    near = nearest(wrong, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to `wrong`, ignoring case; None if none is
    similar.

    Known names with which `wrong` ends, after an underscore, are preferred: "layers" for
    "number_layers".
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), by_lower, n=9)
    near.sort(key=lambda name: not wrong.lower().endswith(f"_{name}"))
    return by_lower[near[0]] if near else None


def converted(name: str, annotation: Any, value: Any) -> Any:
    """Returns a value converted to a type: bool, int, float, str, a Literal or a tuple of these.

    An int becomes a float if the type is float, for example, and a list a tuple. Any other value is
    refused; `name` is that of the setting.
    """
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if value in choices:
            return value
        guess = suggestion(value, choices) if isinstance(value, str) else ""
        listing = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} = {value!r} must be one of {listing}{guess}")
    if typing.get_origin(annotation) is tuple:
        items = typing.get_args(annotation)
        if items[-1] is not Ellipsis:
            return _checked_row(name, items, value)
        return _checked_tuple(name, items[0], value)
    return _SCALARS[annotation](name, value)


def _checked_tuple(name: str, item: Any, value: Any) -> tuple[Any, ...]:
    if item is str and isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        remedy = f"; write ({value!r},)" if type(value) is item else ""
        kind = "tuples" if typing.get_origin(item) is tuple else item.__name__
        raise ConfigError(f"{name} = {value!r} must be a tuple of {kind}{remedy}")
    return tuple(converted(f"{name}[{i}]", item, element) for i, element in enumerate(value))


def _checked_row(name: str, items: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """Returns a tuple whose elements have the types `items`, in this order."""
    if not isinstance(value, list | tuple) or len(value) != len(items):
        kinds = ", ".join(item.__name__ for item in items)
        raise ConfigError(f"{name} = {value!r} must be a tuple of {len(items)} values: ({kinds})")
    return tuple(
        converted(f"{name}[{i}]", item, element)
        for i, (item, element) in enumerate(zip(items, value, strict=True))
    )


def _integer(name: str, value: Any) -> int:
    if type(value) is int:
        if not -(2**63) <= value < 2**63:
            raise ConfigError(f"{name} = {value} is more than 64 bits hold")
        return value
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**31
    remedy = f"; write {value:.0f}" if whole else _without_quotes(value, int)
    raise ConfigError(f"{name} = {value!r} must be an int{remedy}")


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise ConfigError(f"{name} = {value!r} must be a float{_without_quotes(value, float)}")
    # The comparison is also false for NaN and for integers above all floats.
    if not abs(value) <= 1e308:
        raise ConfigError(f"{name} = {value!r} must be finite")
    return float(value)


def _without_quotes(value: Any, kind: type[int | float]) -> str:
    """Returns the remedy for a text that is a number of this kind; "" for other values."""
    try:
        number = kind(value) if isinstance(value, str) else math.inf
    except ValueError:
        return ""
    return f"; write {number!r} without quotes" if math.isfinite(number) else ""


def _boolean(name: str, value: Any) -> bool:
    if type(value) is not bool:
        raise ConfigError(f"{name} = {value!r} must be a bool; write True or False")
    return value


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        number = type(value) in (int, float) and math.isfinite(value)
        remedy = f"; write {str(value)!r} in quotes" if number else ""
        raise ConfigError(f"{name} = {value!r} must be a str{remedy}")
    return value


_SCALARS = {int: _integer, float: _number, bool: _boolean, str: _string}
