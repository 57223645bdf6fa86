"""What a field of a section declares, beside its type and its default.

             a resumed run    one that starts from weights (Training.init_from)
free         may change it    has its own
fixed        keeps it         has its own
inherited    keeps it         takes theirs; to say anything else is refused
adaptable    keeps it         takes theirs, or what is said instead

`cached` is for settings that decide what prepared data are, which are kept under a name made of
them: True for a field's own value, or the name of a property, which decides in its place.

`path` is for settings that name files or directories, which may be those of a stranger's config:
"read", or "written", which only those who train or prepare follow.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
_DECLARED = "setting"
_SOURCES = "sources"  # cached by the content of what they name
_USUAL = "usual"
_AUTO: Any = ("auto",)  # in the place of sources
Path = Literal["", "read", "written"]
MADE_UP = "generated:"  # how sources begin that are no files
MEMORY = "memory:"  # and documents that ask for what they told: docs/memory.md


class Setting(NamedTuple):
    """What a field declares."""

    resume: bool  # a resumed run may change it
    warm_start: Literal["own", "inherited", "adaptable"]
    cached: bool | str  # prepared data depend on it
    path: Path = ""


def free(default: T, *, cached: bool | str = False, path: Path = "") -> T:
    """A field that a resumed run may change."""
    return _field(default, Setting(True, "own", cached, path))


def sources(default: T) -> T:
    """A free field that names what is to be prepared."""
    return _field(default, Setting(True, "own", _SOURCES, "read"))


def held_out(usual: T) -> T:
    """Sources that are not for training: where nobody names any, what `settle` puts there.

    Args:
      usual: those that go with the default of `train`.
    """
    setting = {_DECLARED: Setting(True, "own", _SOURCES, "read"), _USUAL: usual}
    return dataclasses.field(default=_AUTO, metadata=setting)


def settle(section: Any, of_own: tuple[str, ...]) -> None:
    """Fills the held-out sources that nobody named; for `__post_init__`.

    Args:
      of_own: what they are where `train` names neither its default nor made-up data: who trains
        on own data wants to know how well the model does on these.
    """
    made_up = all(name.startswith(MADE_UP) for name in section.train)
    usual = section.train == type(section).train or made_up
    for field in dataclasses.fields(section):
        if _USUAL in field.metadata and getattr(section, field.name) == _AUTO:
            found = field.metadata[_USUAL] if usual else of_own
            object.__setattr__(section, field.name, found)


def fixed(default: T, *, cached: bool | str = False) -> T:
    """A field that a run keeps, but that weights have no say in."""
    return _field(default, Setting(False, "own", cached))


def inherited(default: T) -> T:
    """A field that belongs to the weights."""
    return _field(default, Setting(False, "inherited", False))


def adaptable(default: T) -> T:
    """A field of the weights that may become something else when training starts from them."""
    return _field(default, Setting(False, "adaptable", False))


def settings(section: type) -> dict[str, Setting]:
    """What every field of a section declares; a KeyError where one declares nothing."""
    return {field.name: field.metadata[_DECLARED] for field in dataclasses.fields(section)}


def cached_settings(section: Any) -> dict[str, Any]:
    """What prepared data depend on, beside their sources: values for their place in a cache."""
    names = {
        name if setting.cached is True else setting.cached
        for name, setting in settings(type(section)).items()
        if setting.cached and setting.cached != _SOURCES
    }
    return {name: getattr(section, name) for name in sorted(names)}


def _field(default: T, setting: Setting) -> T:
    # what dataclass takes for a field has the type of its value, as dataclasses.field does it
    return dataclasses.field(default=default, metadata={_DECLARED: setting})


# What recomputation keeps: nothing, all products, or those with weights (not of a batch).
Kept = Literal["nothing", "products", "products_with_weights"]
