"""Resolves the bindings of .gin files and the command line to a Config.

The order of bindings does not matter. A file overrides the files that it includes, at any depth,
and the command line overrides all files. Files that do not include each other must not disagree.
Every binding is checked, even if another one overrides it.

A macro is a named value, which other values may contain.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from brt.config import Config
from brt.config.kinds import kind_sections
from brt.config.names import (
    declaration,
    default_of,
    field_types,
    fields_of,
    has_section,
    names_in_weights,
    task_field,
)
from brt.config.shared import TASK_SECTIONS, tasks_with
from brt.config_io import (
    checked_value,
    configs_directory,
    suggestion,
    unknown_name,
    with_values,
)
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
    """Checks macros. Returns a dictionary that maps each used macro to one of the `bindings` that
    use it.

    From the result, the caller can find macros that are never used. ConfigError is raised if a
    macro is not defined, contains itself, or is too large.
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

    `sizes` has the known sizes of macros; the function adds the sizes that it computes. `inside`
    has the name of the binding, followed by the names of the macros that contain the value.
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


COMMAND_LINE = "--gin_bindings"  # Bindings on the command line have this origin.


class Resolved(NamedTuple):
    """A config and the origins of its settings."""

    config: Config
    # Maps `Section.field` to the origin: "default", "saved", PATH:LINE, or "--gin_bindings".
    origins: dict[str, str]
    bound: dict[str, str]  # the origins of the settings that a file or the command line binds
    notes: tuple[str, ...] = ()  # sentences about bound settings that do nothing or were adjusted


def resolve(
    sources: Mapping[str, Source], *, base: Config | None = None, beside: str = ""
) -> Resolved:
    """Returns the config that `sources` bind, starting from the config `base` or from the defaults.

    `sources` maps the path of each file to the bindings of the file, and `COMMAND_LINE` to those of
    the command line. `beside` is the name of a section that is not a part of configs, such as
    "Sweep"; its bindings are ignored. The message of an error begins with the file and the line.
    """
    task = _task(sources, base)
    _check_names(sources, beside)
    macros = _macros(sources)
    used = check_defined(macros, (b for source in sources.values() for b in source.bindings))
    for name, binding in macros.items():
        if name not in used:
            guess = suggestion(name, used)
            raise ConfigError(f"{binding.origin}: macro {name} is never used{guess}")

    def evaluated(binding: Binding) -> Binding:
        return _checked(binding._replace(value=substituted(binding.value, macros)))

    winners = _winners(sources, lambda b: "." in b.name and not _belongs(b, beside), evaluated)
    return _build(winners, base, task)


def section(sources: Mapping[str, Source], name: str) -> dict[str, Binding]:
    """Returns the bindings of a section that `Config` does not have, such as Sweep, by field name.

    Field names and types of values are not checked.
    """
    macros = _macros(sources)
    own = (b for source in sources.values() for b in source.bindings if _belongs(b, name))
    check_defined(macros, [*macros.values(), *own])
    winners = _winners(
        sources,
        lambda b: _belongs(b, name),
        lambda b: b._replace(value=substituted(b.value, macros)),
    )
    return {full.partition(".")[2]: binding for full, binding in winners.items()}


def _task(sources: Mapping[str, Source], base: Config | None) -> str:
    """Returns the task that the sources set, or else that of `base`. The name may be unknown."""
    found = _winners(sources, lambda b: b.name == "Training.task")
    if not found:
        return (base or Config()).training.task
    macros = _macros(sources)
    check_defined(macros, found.values())
    (winner,) = found.values()
    return str(substituted(winner.value, macros))


def _belongs(binding: Binding, section: str) -> bool:
    return binding.name.partition(".")[0] == section


def _macros(sources: Mapping[str, Source]) -> dict[str, Binding]:
    return _winners(sources, lambda b: "." not in b.name)


def _check_names(sources: Mapping[str, Source], beside: str) -> None:
    for binding in (b for source in sources.values() for b in source.bindings):
        name, _, origin = binding
        if beside and _belongs(binding, beside):
            continue
        if "." in name and name not in field_types():
            raise ConfigError(f"{origin}: {unknown_name(name)}")
        if "." not in name and not re.fullmatch("[A-Z][A-Z0-9_]*", name):
            homes = [field for field in field_types() if field.endswith(f".{name}")]
            guess = f"; did you mean {homes[0]!r}?" if homes else ""
            raise ConfigError(
                f"{origin}: {name!r} is neither Section.field nor a MACRO in upper case{guess}"
            )


def _winners(
    sources: Mapping[str, Source],
    wanted: Callable[[Binding], bool],
    evaluated: Callable[[Binding], Binding] = lambda binding: binding,
) -> dict[str, Binding]:
    """Returns, by name, those bindings that no other binding overrides.

    Only bindings for which `wanted` returns True count. `evaluated` computes their values.
    ConfigError is raised if a source binds a name twice, or if two sources bind it to different
    values and no source overrides both.
    """
    candidates: dict[str, dict[str, Binding]] = {}
    for key, source in sources.items():
        for binding in map(evaluated, filter(wanted, source.bindings)):
            rivals = candidates.setdefault(binding.name, {})
            if key in rivals:
                raise _duplicate(rivals[key], binding, "keep one")
            rivals[key] = binding
    # A source overrides those that it includes, at any depth.
    below = {key: _included(key, sources) for key in sources}
    winners = {}
    for name, rivals in candidates.items():
        best = [b for key, b in rivals.items() if not any(key in below[other] for other in rivals)]
        for other in best[1:]:
            if other.value != best[0].value:
                raise _duplicate(
                    best[0],
                    other,
                    "neither file includes the other, so leave one out or decide by "
                    f"--gin_bindings='{name} = ...'",
                )
        winners[name] = best[0]
    return winners


def _duplicate(first: Binding, second: Binding, remedy: str) -> ConfigError:
    return ConfigError(
        f"{second.origin}: {second.name} is bound twice, to {_text(first.value)} by {first.origin} "
        f"and to {_text(second.value)} here; {remedy}"
    )


def _checked(binding: Binding, task: str | None = None) -> Binding:
    """Converts the value of a binding, and expands variables in paths; errors name the origin."""
    try:
        value = checked_value(binding.name, binding.value, task)
        if fields_of(binding.name) and declaration(binding.name).path:
            many = isinstance(value, tuple)
            value = tuple(map(os.path.expandvars, value)) if many else os.path.expandvars(value)
        return binding._replace(value=value)
    except ConfigError as error:
        raise ConfigError(f"{binding.origin}: {error}") from error


def _build(winners: Mapping[str, Binding], base: Config | None, task: str) -> Resolved:
    origins = dict.fromkeys(field_types(), "default" if base is None else "saved")
    bound = {name: binding.origin for name, binding in winners.items()}
    origins |= bound
    values: dict[str, dict[str, Any]] = {"Training": {}, "Optimizer": {}}
    for name, binding in winners.items():
        if own := task_field(name, task):
            section, _, field = own.partition(".")
            values.setdefault(section, {})[field] = _checked(binding, task).value
        elif task in TASK_SECTIONS:
            value = tuple(binding.value) if isinstance(binding.value, list) else binding.value
            if default_of(name) not in (value, (value,)):
                others = (other for own in fields_of(name) for other in tasks_with(own))
                raise ConfigError(
                    f"{binding.origin}: {name} has no effect if Training.task = {task!r}; set "
                    f"Training.task = {next(others)!r}, or remove {name}"
                )
    warmup = _shorten_warmup(values, origins, base or Config())
    if base is None and values["Training"].get("init_from"):
        # Settings that have their defaults get the values that are saved with the weights. The
        # settings that a file or a flag binds to their defaults keep them: `init_keep` names these.
        values["Training"].setdefault("init_keep", _bound_to_defaults(winners, task))
    try:
        config = with_values(values, base)
    except ConfigError as error:
        raise explained(error, bound) from error
    return Resolved(config, origins, bound, (*filter(None, [warmup]), *_idle(config, winners)))


def _bound_to_defaults(winners: Mapping[str, Binding], task: str) -> tuple[str, ...]:
    names = sorted(names_in_weights() & winners.keys())
    return tuple(n for n in names if _checked(winners[n], task).value == default_of(n))


def _idle(config: Config, winners: Mapping[str, Binding]) -> Iterator[str]:
    """Yields a sentence for each kind of layers whose settings the user has changed, although the
    model has no layer of this kind.
    """
    for section, cls in kind_sections().items():
        bound = [b for name, b in winners.items() if name.partition(".")[0] == section]
        bound = [b for b in bound if b.value != getattr(cls, b.name.partition(".")[2])]
        # Bindings in the .gin files that come with brt are left out, because these files set fields
        # of several kinds on purpose.
        files = [Path(b.origin.rpartition(":")[0]).resolve() for b in bound]
        own = configs_directory().resolve()
        bound = [b for b, file in zip(bound, files, strict=True) if not file.is_relative_to(own)]
        if bound and not has_section(config, section):
            yield (
                f"{bound[0].origin}: {bound[0].name} does nothing, because no layer is of this "
                f"kind; name some in {section}.layers"
            )


def _shorten_warmup(
    values: dict[str, dict[str, Any]], origins: dict[str, str], start: Config
) -> str:
    """Shortens the warm-up to a tenth of the steps if the command line asks for a short trial.

    This happens only if --gin_bindings sets the steps and not the warm-up, because a file must be
    consistent by itself. The function changes `values` and `origins`, and returns a sentence about
    the change, or "".
    """
    steps, name = values["Training"].get("steps", 0), "Optimizer.warmup_steps"
    chosen = values["Optimizer"]
    schedule = chosen.get("schedule", start.optimizer.schedule)
    warmup = chosen.get("warmup_steps", start.optimizer.warmup_steps)
    asked = origins["Training.steps"] == COMMAND_LINE != origins[name]
    epochs = values["Training"].get("epochs", start.training.epochs)
    if not asked or epochs or schedule not in ("cosine", "linear") or not 0 < steps <= warmup:
        return ""
    chosen["warmup_steps"] = steps // 10
    note = (
        f"{name} = {steps // 10}, a tenth of Training.steps = {steps}, for which {warmup} "
        f"({origins[name]}) are too many"
    )
    origins[name] = "a tenth of Training.steps"
    return note


def explained(error: ConfigError, origins: Mapping[str, str]) -> ConfigError:
    """Returns the error with a longer message, which also says where settings were bound."""
    return ConfigError(f"{error}{_whence(str(error), origins)}")


def _whence(message: str, origins: Mapping[str, str]) -> str:
    """Returns ` (Model.window set at a.gin:3, ...)` for the bound settings that a message names."""
    names = dict.fromkeys(re.findall(r"\b[A-Z]\w*\.\w+", message))
    places = [
        f"{name} set {'at' if ':' in origins[name] else 'by'} {origins[name]}"
        for name in names
        if name in origins
    ]
    return f" ({', '.join(places)})" if places else ""


def _included(key: str, sources: Mapping[str, Source]) -> set[str]:
    """Returns the keys of all sources that a source includes, at any depth."""
    found: set[str] = set()
    waiting = list(sources[key].includes)
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += sources[other].includes
    return found


def _text(value: Any) -> str:
    return f"%{value.name}" if isinstance(value, Macro) else repr(value)
