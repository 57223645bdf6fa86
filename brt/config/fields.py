"""Functions that declare the fields of config sections.

Each function takes the default of a field and returns a `dataclasses.field` whose metadata contain
the declaration. In this table, the first column is the function that declares a field. The second
column says whether a resumed run may change the field. The third column says which value the field
has in a run that starts from weights (Training.init_from):

             resumed run         run that starts from weights
free         may change it       the value of the run's own config
fixed        must not change it  the value of the run's own config
inherited    must not change it  the value of the weights; another value is an error
adaptable    must not change it  the value of the weights, unless the config sets another value

A `derived` field is no setting: the data or converted weights determine its value. Saved configs
contain derived fields, and .gin files cannot bind them.

The argument `cached` marks settings that determine prepared data (tokens and features), which are
cached under a hash of these settings. If `cached` is True, the value of the field itself is hashed.
If `cached` is the name of a property of the section, the value of this property is hashed instead.

The argument `path` marks settings that name files or directories. They must be known, because the
config of a stranger's run may name any path. The argument is "read" if brt reads the files, "data"
if they are sources of data, and "written" if brt writes them. Only commands that train or prepare
write such files.
"""

import dataclasses
import os
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
_DECLARED = "setting"
_SOURCES = "sources"  # This value of `cached` marks fields that name the sources of data.
_USUAL = "usual"
_NESTED = "nested"
_AUTO: Any = ("auto",)  # This value stands for held-out sources that the user did not name.
Path = Literal["", "read", "data", "written"]
GENERATED = "generated:"  # Sources with this prefix are generated instead of read.
MEMORY = "memory:"  # Sources with this prefix are memory tasks (docs/memory.md).


class Setting(NamedTuple):
    """The declaration of a field."""

    resume: bool  # True if a resumed run may change the field
    # Where a run that starts from weights takes the value from: its config ("own"), the weights
    # ("inherited"), or the weights unless the config sets another value ("adaptable").
    warm_start: Literal["own", "inherited", "adaptable"]
    # True if the value determines prepared data, or the name of a property of the section if the
    # value of that property determines them.
    cached: bool | str
    path: Path = ""  # how brt uses the files that the value names; "" if it names none
    derived: bool = False  # True if the data or converted weights determine the value


def free(default: T, *, cached: bool | str = False, path: Path = "") -> T:
    """Declares a field that a resumed run may change."""
    return _field(default, Setting(True, "own", cached, path))


def sources(default: T) -> T:
    """Declares a field that names sources of training data, which a resumed run may change."""
    return _field(default, Setting(True, "own", _SOURCES, "data"))


def held_out(usual: T) -> T:
    """Declares a field that names the sources of a held-out split (validation or test).

    The default of the field is ("auto",). When the section is made, `fill_held_out` replaces this
    default. The field gets `usual` if the section's field `train` has its default or names only
    generated data. Otherwise it gets the sources that the section passes to `fill_held_out`.
    """
    setting = {_DECLARED: Setting(True, "own", _SOURCES, "data"), _USUAL: usual}
    return dataclasses.field(default=_AUTO, metadata=setting)


def fill_held_out(section: Any, otherwise: tuple[str, ...]) -> None:
    """Sets the fields declared by `held_out` that the user did not set; called by `__post_init__`.

    If `train` names data of the user, the fields get `otherwise`, because the user wants to
    evaluate on such data. In all other cases, they get the argument `usual` of `held_out`.
    """
    made_up = all(name.startswith(GENERATED) for name in section.train)
    usual = section.train == type(section).train or made_up
    for field in dataclasses.fields(section):
        if _USUAL in field.metadata and getattr(section, field.name) == _AUTO:
            value = field.metadata[_USUAL] if usual else otherwise
            object.__setattr__(section, field.name, value)


def fixed(default: T, *, cached: bool | str = False) -> T:
    """Declares a field that a resumed run must not change, and that no weights determine."""
    return _field(default, Setting(False, "own", cached))


def inherited(default: T) -> T:
    """Declares a field that describes the weights of a model, such as the width of a layer."""
    return _field(default, Setting(False, "inherited", False))


def adaptable(default: T) -> T:
    """Declares a field that may differ from its value in the weights, such as a window."""
    return _field(default, Setting(False, "adaptable", False))


def derived(default: T, *, inherited: bool = True, cached: bool = False) -> T:
    """Declares a field that no .gin file binds: data or (if `inherited`) weights determine it."""
    warm_start: Literal["own", "inherited"] = "inherited" if inherited else "own"
    return _field(default, Setting(False, warm_start, cached, derived=True))


def nested(default: T) -> T:
    """Declares a field that contains a section or a tuple of sections, and is no setting itself."""
    return dataclasses.field(default=default, metadata={_NESTED: True})


def is_declared(field: "dataclasses.Field[Any]") -> bool:
    return any(key in field.metadata for key in (_DECLARED, _NESTED))


def settings(section: type) -> dict[str, Setting]:
    """Returns the declaration of every setting of a section, by the name of the field."""
    return {
        field.name: field.metadata[_DECLARED]
        for field in dataclasses.fields(section)
        if _NESTED not in field.metadata
    }


def cached_settings(section: Any) -> dict[str, Any]:
    """Returns the values of a section that determine prepared data, by name of field or property.

    The fields that name sources are left out, because hashes of the files represent them. If a
    field names another file, only the suffix of this name is returned (if it has one), because
    files may be moved.
    """
    names: set[str] = set()
    for name, setting in settings(type(section)).items():
        if setting.cached and setting.cached != _SOURCES:
            names.add(name if setting.cached is True else str(setting.cached))
    values = {name: getattr(section, name) for name in sorted(names)}
    for name in names & {name for name, setting in settings(type(section)).items() if setting.path}:
        values[name] = os.path.splitext(values[name])[1] or values[name]
    return values


def _field(default: T, setting: Setting) -> T:
    # The annotated return type is the type of the default and not dataclasses.Field, so that type
    # checkers accept declarations such as `layers: int = fixed(12)`.
    return dataclasses.field(default=default, metadata={_DECLARED: setting})


# Rematerialisation recomputes results of the forward pass in the backward pass. The policy says
# which results are stored instead: none, the results of all matrix products, or the results of
# matrix products of activations with weights (and not of products between activations).
RematPolicy = Literal["nothing", "products", "products_with_weights"]
