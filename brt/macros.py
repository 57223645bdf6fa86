"""Defines the bindings that .gin files contain, and replaces the macros in their values."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from brt.config_io import suggestion
from brt.errors import ConfigError

MAX_NESTING = 50  # Macros, brackets, and included files may be nested at most this deeply.
# At most this number of string literals may stand side by side; Python joins them to one string.
MOST_STRINGS = 100
# After its macros are replaced, a value may have at most this number of scalars and containers.
MOST_VALUES = 10_000


@dataclasses.dataclass(frozen=True)
class Macro:
    """A reference to a macro, `%NAME`, inside a value."""

    name: str


class Binding(NamedTuple):
    """A binding `name = value`."""

    name: str  # `Section.field` for a setting, `NAME` for a macro
    value: Any  # a Python literal, which contains a `Macro` for each %NAME
    origin: str  # path:line or the name of a flag


class Source(NamedTuple):
    """The bindings of a .gin file or of the command line.

    A dictionary holds all sources of a command. The key of a file is the file's path, and the key
    of the command line is `COMMAND_LINE`; `brt.gin_files.read_sources` fills the dictionary.
    """

    bindings: list[Binding]  # in the order in which they are written
    includes: list[str]  # keys of the files that an `include` statement or --gin_file names


def check_defined(macros: Mapping[str, Binding], bindings: Iterable[Binding]) -> dict[str, Binding]:
    """Returns, for each macro that bindings use, one of these bindings; refuses invalid macros.

    The caller can thus find macros that are never used. A macro must be defined, must not contain
    itself, and must not be too large.
    """
    used: dict[str, Binding] = {}
    bindings = list(bindings)
    for binding in bindings:
        used |= dict.fromkeys(_macros_in(binding.value), binding)
    for name, user in used.items():
        if name not in macros:
            guess = suggestion(name, macros)
            raise ConfigError(
                f"{user.origin}: {user.name} uses %{name}, which is not defined{guess}"
            )
    sizes: dict[str, int] = {}
    for binding in bindings:
        _size(binding.value, macros, sizes, (binding.name,), binding.origin)
    return used


def _size(
    value: Any,
    macros: Mapping[str, Binding],
    sizes: dict[str, int],
    inside: tuple[str, ...],
    origin: str,
) -> int:
    """Returns the number of scalars and containers of a value after replacing its macros.

    `sizes` are the known sizes of macros; the function adds the sizes that it computes. `inside`
    are the names of the binding, and of the macros that contain the value.
    """
    if isinstance(value, Macro):
        if value.name in inside:
            raise ConfigError(f"{origin}: macro {value.name} is defined by itself; give it a value")
        if len(inside) > MAX_NESTING:
            raise ConfigError(f"{origin}: macros are nested more than {MAX_NESTING} deep")
        if value.name not in sizes:
            defined = macros[value.name].value
            sizes[value.name] = _size(defined, macros, sizes, (*inside, value.name), origin)
        return sizes[value.name]
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, list | tuple | dict):
        return 1
    size = 1 + sum(_size(part, macros, sizes, inside, origin) for part in parts)
    if size > MOST_VALUES:
        raise ConfigError(f"{origin}: {inside[-1]} is more than {MOST_VALUES:,} values")
    return size


def substituted(value: Any, macros: Mapping[str, Binding]) -> Any:
    """Returns a value in which each `Macro` is replaced by the value of the macro."""
    if isinstance(value, Macro):
        return substituted(macros[value.name].value, macros)
    if isinstance(value, list | tuple):
        return type(value)(substituted(item, macros) for item in value)
    if isinstance(value, dict):
        return {k: substituted(item, macros) for k, item in value.items()}
    return value


def _macros_in(value: Any) -> Iterator[str]:
    if isinstance(value, Macro):
        yield value.name
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _macros_in(item)
    elif isinstance(value, dict):
        yield from _macros_in(list(value.values()))
