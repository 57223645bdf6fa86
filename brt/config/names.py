"""Functions that look up settings by name.

A setting is a name to which .gin files give a value, such as `Model.layers`. Most settings stand
for one field of one section. Some stand for a field that the sections of several tasks have in
common: `Data.train` stands for `Pairs.train` in summarisation (`brt.config.shared`).
"""

import functools
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from brt.config import SECTIONS, Config
from brt.config.fields import Setting, settings
from brt.config.kinds import kind_sections
from brt.config.model import PARTS, Model
from brt.config.shared import field_name, field_names, public_name

_PARTS = {name: typing.get_type_hints(Model)[field] for name, field in PARTS.items()}
_CORE = {section: typing.get_type_hints(Config)[name] for section, name in SECTIONS.items()}


class _Names(NamedTuple):
    sections: Mapping[str, type]
    fields: dict[str, Any]  # type of each field, by CLASS.FIELD (`class_field_types`)
    settings: dict[str, Any]  # type of each setting, by its name in .gin files (`field_types`)


def _names() -> _Names:
    # Kinds may be registered after the first call, so the cached result depends on the sections of
    # all kinds.
    return _names_with(tuple(kind_sections().items()))


@functools.cache
def _names_with(kinds: tuple[tuple[str, type], ...]) -> _Names:
    sections = MappingProxyType({"Model": _CORE["Model"], **_PARTS, **dict(kinds), **_CORE})
    fields: dict[str, Any] = {}
    settings_: dict[str, dict[str, list[Any]]] = {section: {} for section in sections}
    for section, cls in sections.items():
        hints = typing.get_type_hints(cls)
        for field, setting in settings(cls).items():
            fields[f"{section}.{field}"] = hints[field]
            if not setting.derived:
                name = public_name(f"{section}.{field}")
                types = settings_[name.partition(".")[0]].setdefault(name, [])
                types.append(hints[field])
    unions = {name: _union(types) for own in settings_.values() for name, types in own.items()}
    return _Names(sections, fields, unions)


def section_types() -> Mapping[str, type]:
    """Returns the class of every section by the section's name."""
    return _names().sections


def section_of(config: Config, name: str) -> Any:
    """Returns the section with a name such as "Recurrence"; one with all defaults if the model
    lacks the section.
    """
    if name in SECTIONS:
        return getattr(config, SECTIONS[name])
    if name in PARTS:
        return getattr(config.model, PARTS[name])
    return config.model.of(kind_sections()[name])


def has_section(config: Config, name: str) -> bool:
    """Returns True if the model of a config uses the section `name`.

    A model does not use the sections of kinds of layers that it lacks. It uses the section `Rotary`
    only if it has rotary or learned positions.
    """
    if name in SECTIONS or name in PARTS:
        return name != "Rotary" or config.model.positions in ("rotary", "learned")
    return any(type(own).__name__ == name for own in config.model.kinds)


def field_types() -> dict[str, Any]:
    """Returns the type of every setting by its name in .gin files: {"Model.layers": int, ...}.

    If several sections have a setting, its type allows all values that any of these sections
    allows.
    """
    return _names().settings


def class_field_types() -> dict[str, Any]:
    """Returns the type of every field by its name in its class: {"Seq2Seq.dropout": float, ...}.

    In .gin files and in `field_types`, "Pairs.buckets" and "Speech.buckets" both have the name
    "Data.buckets". Derived fields, which .gin files cannot bind, are included.
    """
    return _names().fields


def names_in_weights() -> set[str]:
    """Returns the names of settings that may take their values from Training.init_from."""
    return {name for name in field_types() if declaration(name).warm_start != "own"}


def derived_fields() -> list[str]:
    """Returns the names of all derived fields, which no .gin file can set."""
    return [
        f"{section}.{name}"
        for section, cls in section_types().items()
        for name, setting in settings(cls).items()
        if setting.derived
    ]


def _union(kinds: list[Any]) -> Any:
    """Returns a type with the values of all `kinds`, which are equal types or Literals."""
    if all(kind == kinds[0] for kind in kinds):
        return kinds[0]
    choices = [choice for kind in kinds for choice in typing.get_args(kind)]
    return Literal[tuple(dict.fromkeys(choices))]


def fields_of(name: str) -> list[str]:
    """Returns the fields that a setting may stand for: "Pairs.buckets", ... for "Data.buckets"."""
    return [own for own in field_names(name) if own in class_field_types()]


def task_field(name: str, task: str) -> str | None:
    """Returns the field that a setting stands for in runs of a task; None if the task lacks it."""
    own = field_name(name, task)
    return own if own in class_field_types() else None


def declaration(name: str) -> Setting:
    """Returns the declaration of a setting, which is the same in all sections that have it."""
    section, _, field = fields_of(name)[0].partition(".")
    return settings(section_types()[section])[field]


def default_of(name: str) -> Any:
    """Returns the default of a field or setting. If several sections have the setting, this is the
    default in the first of these sections.
    """
    section, _, field = fields_of(name)[0].partition(".")
    return getattr(_defaults(section_types()[section]), field)


@functools.cache
def _defaults(section: type) -> Any:
    return section()
