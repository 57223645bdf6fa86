"""Functions with which config sections check their fields, and functions that check types.

If a check fails, the function raises a ConfigError that names the setting and its value.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable
from typing import Any, Literal

from brt.config.fields import fill_held_out, settings
from brt.config.shared import public_name
from brt.errors import ConfigError
from brt.storage import places


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'NAME'?" with the most similar known name; "" if none is similar."""
    near = nearest(wrong, known)
    return f"; did you mean {near!r}?" if near else ""


def nearest(wrong: str, known: Iterable[str]) -> str | None:
    """Returns the known name most similar to `wrong`, ignoring case; None if none is similar.

    If `wrong` ends with an underscore and a known name, this name is preferred: "layers" for
    "number_layers".
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(wrong.lower(), by_lower, n=9)
    near.sort(key=lambda name: not wrong.lower().endswith(f"_{name}"))
    return by_lower[near[0]] if near else None


def converted(name: str, annotation: Any, value: Any) -> Any:
    """Returns a value converted to a type: bool, int, float, str, a Literal or a tuple of these.

    For example, an int becomes a float if the type is float, and a list becomes a tuple if the type
    is a tuple. Values that cannot be converted are refused. `name` is the name of the setting.
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


PART = "part:"  # The source 'part:0.05' of a split stands for 5 % of the training rows.
LARGEST = 2**31 - 1  # Counts in settings are at most this number, because indices are int32.
MAX_LAYERS = 1024  # Models have at most this number of layers. Compiling more would take hours.


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def name_of(section: object, field: str) -> str:
    """Returns the name that a field of a section has in .gin files.

    A section may have another name in .gin files than its class: users write "Data.train" for the
    field `train` of the class `Pairs`, because each task has its own class for the section `Data`.
    """
    return public_name(f"{type(section).__name__}.{field}")


def check_finite(section: Any) -> None:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{name_of(section, field.name)} = {value} must be finite")


def settle_paths(section: Any) -> None:
    """Replaces names of files in a section by the form that configs keep (`brt.storage.places`)."""
    for field, setting in settings(type(section)).items():
        if setting.path:
            value, asked = getattr(section, field), name_of(section, field)
            many = isinstance(value, tuple)
            settle = {"written": places.local_only, "data": places.source}.get(
                setting.path, places.settled
            )
            paths = tuple(settle(name, asked) for name in (value if many else (value,)))
            object.__setattr__(section, field, paths if many else paths[0])


def check_section(
    section: Any, *, positive: Iterable[str] = (), shares: Iterable[str] = (),
    any_sign: Iterable[str] = (),
) -> None:  # fmt: skip
    """Checks the numbers of a section, and expands its paths (`settle_paths`).

    Fields in `positive` must be above 0, and fields in `shares` must be in [0, 1). Other numbers
    must not be negative, unless the field is in `any_sign`.
    """
    check_finite(section)
    settle_paths(section)
    check_shares(section, *shares)
    check_positive(section, *positive)
    special = {*positive, *shares, *any_sign}
    names = (field.name for field in dataclasses.fields(section) if field.name not in special)
    numbers = (name for name in names if isinstance(getattr(section, name), (int, float)))
    check_not_negative(section, *numbers)


def check_positive(section: object, *names: str) -> None:
    """Refuses fields that are not above 0, or are integers that exceed an int32."""
    for name in names:
        _check_number(section, name, getattr(section, name) > 0, "be above 0")


def check_not_negative(section: object, *names: str) -> None:
    """Refuses fields that are negative, or are integers that exceed an int32."""
    for name in names:
        _check_number(section, name, getattr(section, name) >= 0, "not be negative")


def _check_number(section: object, name: str, holds: bool, demand: str) -> None:
    value, shown = getattr(section, name), name_of(section, name)
    check(holds, f"{shown} = {value} must {demand}")
    layers = name.endswith("layers")
    most, text = (MAX_LAYERS, f"{MAX_LAYERS:,}") if layers else (LARGEST, LARGEST)
    check(isinstance(value, float) or value <= most, f"{shown} = {value} must be at most {text}")


def check_shares(section: object, *names: str, like: str = "") -> None:
    """Refuses fields that are not in [0, 1). If `like` names a setting, -1 is also allowed, and
    stands for the value of that setting.
    """
    for name in names:
        value = getattr(section, name)
        check(
            0 <= value < 1 or bool(like and value == -1),
            f"{name_of(section, name)} = {value} must be in [0, 1)"
            + f", or -1 for the value of {like}" * bool(like),
        )


def check_items(section: object, name: str, known: tuple[str, ...]) -> None:
    """Refuses a tuple with items that are not in `known`, and sorts the items as in `known`.

    Sections in which users wrote the same items in another order are then equal.
    """
    value = getattr(section, name)
    unknown = [item for item in value if item not in known]
    check(
        not unknown,
        f"{name_of(section, name)} = {value} must consist of items from "
        f"{', '.join(map(repr, known))}",
    )
    object.__setattr__(section, name, tuple(item for item in known if item in value))


def check_rows(section: Any, longest: str = "") -> None:
    """Checks the fields that all sections for rows have, and fills in the held-out sources.

    If the user named training rows but no rows for the validation or the test split, the split
    becomes 5 % of the training rows. If the training rows are the default or generated, the split
    has the default sources that the section declares. Buckets (padded lengths) must ascend. If
    `longest` is given, the last bucket must equal the value of the field with this name.
    """
    fill_held_out(section, (f"{PART}0.05",))
    for split in ("validation", "test"):
        share_of(section, split)
    check(bool(section.train), "Data.train names no source")
    buckets = section.buckets
    check(
        not buckets or (min(buckets) > 0 and list(buckets) == sorted({*buckets})),
        f"Data.buckets = {buckets} must ascend and be above 0",
    )
    if longest and buckets:
        limit = getattr(section, longest)
        check(
            buckets[-1] == limit,
            f"the last of Data.buckets = {buckets} must be {name_of(section, longest)} = {limit}",
        )


def share_of(section: Any, split: str) -> float:
    """Returns the share of the training rows that a split holds out, or 0.0 if it names sources.

    The value of the section's field `split` is ("part:SHARE",) or names sources.
    """
    names = getattr(section, split)
    if not any(name.startswith(PART) for name in names):
        return 0.0
    try:
        (share,) = (float(name.removeprefix(PART)) for name in names)
    except ValueError:
        share = 0.0
    setting = f"{name_of(section, split)} = {names}"
    check(0 < share < 0.5, f"{setting} must be one {PART}SHARE from 0 to 0.5, such as {PART}0.05")
    return share


def column(section: Any, role: str, usual: str = "") -> str:
    """Returns the column that a section names for a role, or `usual` if it names none."""
    return dict(pair.split("=", 1) for pair in section.columns).get(role, usual)


def check_columns(section: Any, *roles: str) -> None:
    """Refuses items of `columns` that are not ROLE=COLUMN with a role in `roles`, and roles that
    are named twice. Sorts the items in the order of `roles`.
    """
    form = " or ".join(f"'{role}=COLUMN'" for role in roles)
    for pair in section.columns:
        role, _, name = pair.partition("=")
        check(
            role in roles and bool(name),
            f"Data.columns = {section.columns}: {pair!r} must be {form}",
        )
    named = [pair.partition("=")[0] for pair in section.columns]
    check(len({*named}) == len(named), f"Data.columns = {section.columns} names a column twice")
    ordered = tuple(sorted(section.columns, key=lambda pair: roles.index(pair.partition("=")[0])))
    object.__setattr__(section, "columns", ordered)
