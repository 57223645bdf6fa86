"""Functions that look up settings by name.

A setting is a name that .gin files give a value, such as `Model.layers`. It is a field of a
section, or a field that the sections of several tasks have in common (`brt.config.shared`).
"""

import functools
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from brt.config import SECTIONS, Config
from brt.config.fields import Setting, settings
from brt.config.kinds import kind_sections
from brt.config.merged import MERGED
from brt.config.model import PARTS, Model
from brt.config.renamed import RENAMED
from brt.config.shared import field_name, field_names, public_name

_PARTS = {name: typing.get_type_hints(Model)[field] for name, field in PARTS.items()}
_CORE = {section: typing.get_type_hints(Config)[name] for section, name in SECTIONS.items()}


def section_types() -> Mapping[str, type]:
    """Returns the class of every section by the section's name.

    The sections of the model's parts and of the kinds of layers come directly after `Model`.
    """
    return _section_types(_kinds())


def _kinds() -> tuple[tuple[str, type], ...]:
    """Returns the sections of all registered kinds; what is cached in this file depends on them."""
    return tuple(kind_sections().items())


@functools.cache
def _section_types(kinds: tuple[tuple[str, type], ...]) -> Mapping[str, type]:
    return MappingProxyType({"Model": _CORE["Model"], **_PARTS, **dict(kinds), **_CORE})


def section_of(config: Config, name: str) -> Any:
    """Returns the section of a config by its name.

    If the model has no layers of the section's kind, a section with all defaults is returned.
    """
    if name in SECTIONS:
        return getattr(config, SECTIONS[name])
    if name in PARTS:
        return getattr(config.model, PARTS[name])
    return config.model.of(kind_sections()[name])


def has_section(config: Config, name: str) -> bool:
    """Returns True if the model of a config uses the section `name`.

    A section is not used if it is for a kind of layers, or of positions, that the model does not
    have.
    """
    if name in SECTIONS or name in PARTS:
        return name != "Rotary" or config.model.positions == "rotary"
    return any(type(own).__name__ == name for own in config.model.kinds)


def field_types() -> dict[str, Any]:
    """Returns the type of every setting by its name in .gin files: {"Model.layers": int, ...}.

    If several sections have a setting (`brt.config.shared`), its type allows the values that any of
    these sections allows.
    """
    return _setting_types(_kinds())


def own_types() -> dict[str, Any]:
    """Returns the type of every field by the section that has it: {"Seq2Seq.dropout": float, ...}.

    `field_types` has the names that .gin files use instead. A setting of several tasks has only one
    such name, such as "Data.buckets" for the fields "Pairs.buckets" and "Speech.buckets". The
    result includes derived fields, which .gin files cannot bind; `field_types` does not.
    """
    return _field_types(_kinds())


def derived_fields() -> list[str]:
    """Returns the names of all derived fields, which no .gin file can set: ["Encoder.features",
    ...].
    """
    return [
        f"{section}.{name}"
        for section, cls in section_types().items()
        for name, setting in settings(cls).items()
        if setting.derived
    ]


@functools.cache
def _field_types(kinds: tuple[tuple[str, type], ...]) -> dict[str, Any]:
    return {
        f"{section}.{name}": hints[name]
        for section, cls in _section_types(kinds).items()
        for hints in [typing.get_type_hints(cls)]
        for name in settings(cls)
    }


@functools.cache
def _setting_types(kinds: tuple[tuple[str, type], ...]) -> dict[str, Any]:
    types: dict[str, dict[str, list[Any]]] = {section: {} for section in _section_types(kinds)}
    derived = derived_fields()
    for own, type_ in _field_types(kinds).items():
        if own in derived:
            continue
        name = public_name(own)
        types[name.partition(".")[0]].setdefault(name, []).append(type_)
    return {name: _union(own) for names in types.values() for name, own in names.items()}


def _union(kinds: list[Any]) -> Any:
    """Returns a type with the values of all `kinds`, which are equal types or Literals."""
    if all(kind == kinds[0] for kind in kinds):
        return kinds[0]
    choices = [choice for kind in kinds for choice in typing.get_args(kind)]
    return Literal[tuple(dict.fromkeys(choices))]


def fields_of(name: str) -> list[str]:
    """Returns the fields that a setting may refer to, one for each section that has the setting.

    For "Data.buckets", the result is ["Pairs.buckets", "Speech.buckets", ...].
    """
    return [own for own in field_names(name) if own in own_types()]


def task_field(name: str, task: str) -> str | None:
    """Returns the field that a setting refers to in runs of a task: "Pairs.train" for "Data.train".

    The result is None if the sections of the task do not have the setting.
    """
    own = field_name(name, task)
    return own if own in own_types() else None


def declaration(name: str) -> Setting:
    """Returns the declaration of a setting, which is the same in all sections that have it.

    A `Setting` says whether a resumed run may change the value, which value a run that starts from
    weights has, whether prepared data depend on the value, whether the value names a path, and
    whether the field is derived.
    """
    section, _, field = fields_of(name)[0].partition(".")
    return settings(section_types()[section])[field]


def default_of(name: str) -> Any:
    """Returns the default of a field or setting, such as "Pairs.train" or "Data.train". If several
    sections have the setting, their defaults may differ, and the first section's is returned.
    """
    section, _, field = fields_of(name)[0].partition(".")
    return getattr(_defaults(section_types()[section]), field)


@functools.cache
def _defaults(section: type) -> Any:
    return section()


def current_names(name: str) -> tuple[str, ...]:
    """Returns the present names of a setting in .gin files.

    A setting that was never renamed keeps its name. A setting that was split has several names. A
    setting that became a part of another setting has the name of the other setting.
    """
    if name in MERGED:
        return (public_name(MERGED[name].into),)
    return RENAMED.get(name, (public_name(name) if name in own_types() else name,))
