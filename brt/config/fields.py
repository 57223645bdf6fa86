"""Functions that declare the fields of config sections.

A field is declared by one of these functions. The second column says whether a resumed run may
change the field. The third column says which value the field has in a run that starts from weights
(Training.init_from):

             resumed run         run that starts from weights
free         may change it       the value of the run's own config
fixed        must not change it  the value of the run's own config
inherited    must not change it  the value of the weights; another value is an error
adaptable    must not change it  the value of the weights, unless the config sets another value

A `derived` field is no setting: the data or converted weights determine it. Saved configs contain
it, and .gin files cannot bind it.

`cached` marks settings that determine prepared data, which are cached under a hash of these
settings. It is True for the value of the field itself, or the names of properties to use instead.

The argument `path` marks settings that name files or directories, because the config of a
stranger's run may name any path. It is "read" if brt reads the files, and "written" if brt writes
them, which only commands that train or prepare do.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, TypeVar

T = TypeVar("T")
_DECLARED = "setting"
_SOURCES = "sources"  # This value of `cached` marks files on whose content prepared data depend.
_USUAL = "usual"
_NESTED = "nested"
_AUTO: Any = ("auto",)  # This value stands for held-out sources that the user did not name.
Path = Literal["", "read", "written"]
GENERATED = "generated:"  # Sources with this prefix are generated instead of read.
MEMORY = "memory:"  # Sources with this prefix are memory tasks (docs/memory.md).


class Setting(NamedTuple):
    """The declaration of a field.

    Attributes:
      resume: True if a resumed run may change the field.
      warm_start: the value in a run that starts from weights: "own" takes the value of the run's
        config, "inherited" the value of the weights, and "adaptable" the value of the weights
        unless the config sets another one.
      cached: True if the value determines prepared data; or the names of properties of the section
        that determine prepared data instead of the value itself.
      path: "read" or "written" if the value names files that brt reads or writes; otherwise "".
      derived: True if the data or converted weights determine the value, and no .gin file can bind
        the field.
    """

    resume: bool
    warm_start: Literal["own", "inherited", "adaptable"]
    cached: bool | str | tuple[str, ...]
    path: Path = ""
    derived: bool = False


def free(default: T, *, cached: bool | str | tuple[str, ...] = False, path: Path = "") -> T:
    """Declares a field that a resumed run may change.

    Args:
      default: the default of the field.
      cached: True if the value determines prepared data; or the names of properties of the section
        that determine prepared data instead of the value itself.
      path: "read" or "written" if the value names files that brt reads or writes; otherwise "".
    """
    return _field(default, Setting(True, "own", cached, path))


def sources(default: T) -> T:
    """Declares a free field with this default that names the sources of data to prepare."""
    return _field(default, Setting(True, "own", _SOURCES, "read"))


def held_out(usual: T) -> T:
    """Declares the sources of a held-out split. The default is ("auto",), which `fill_held_out`
    replaces when the section is made.

    Args:
      usual: the sources that replace "auto" if `train` has its default or is generated.
    """
    setting = {_DECLARED: Setting(True, "own", _SOURCES, "read"), _USUAL: usual}
    return dataclasses.field(default=_AUTO, metadata=setting)


def fill_held_out(section: Any, otherwise: tuple[str, ...]) -> None:
    """Sets the held-out sources that the user did not name. `__post_init__` calls this function.

    Args:
      section: the section, whose fields declared by `held_out` are set in place.
      otherwise: the held-out sources if `train` names data of the user, and not its default or
        generated data. Users want to be evaluated on data like their own.
    """
    made_up = all(name.startswith(GENERATED) for name in section.train)
    usual = section.train == type(section).train or made_up
    for field in dataclasses.fields(section):
        if _USUAL in field.metadata and getattr(section, field.name) == _AUTO:
            value = field.metadata[_USUAL] if usual else otherwise
            object.__setattr__(section, field.name, value)


def fixed(default: T, *, cached: bool | str = False) -> T:
    """Declares a field that a resumed run must keep, and that does not belong to the weights.

    Args:
      default: the default of the field.
      cached: True if the value determines prepared data; see `free`.
    """
    return _field(default, Setting(False, "own", cached))


def inherited(default: T) -> T:
    """Declares a field with this default that belongs to the weights, such as a layer's width."""
    return _field(default, Setting(False, "inherited", False))


def adaptable(default: T) -> T:
    """Declares a field with this default that belongs to the weights. A run that starts from the
    weights may nevertheless change the value, such as the window.
    """
    return _field(default, Setting(False, "adaptable", False))


def derived(default: T, *, inherited: bool = True) -> T:
    """Declares a field that no .gin file binds, because data or converted weights determine it.

    Args:
      default: the value as long as it is not determined.
      inherited: True if the field belongs to the weights.
    """
    return _field(default, Setting(False, "inherited" if inherited else "own", False, derived=True))


def nested(default: T) -> T:
    """Declares a field whose default is a section or a tuple of sections, and which is no setting
    itself.
    """
    return dataclasses.field(default=default, metadata={_NESTED: True})


def settings(section: type) -> dict[str, Setting]:
    """Returns the declaration of every setting of a section, by the name of the field.

    Raises:
      KeyError: a field is not declared by a function of this module.
    """
    return {
        field.name: field.metadata[_DECLARED]
        for field in dataclasses.fields(section)
        if _NESTED not in field.metadata
    }


def cached_settings(section: Any) -> dict[str, Any]:
    """Returns the values of a section that determine prepared data, by name.

    The sources are left out, because the hashes of their files identify them.
    """
    names: set[str] = set()
    for name, setting in settings(type(section)).items():
        if setting.cached and setting.cached != _SOURCES:
            other = setting.cached if isinstance(setting.cached, tuple) else (setting.cached,)
            names |= {name if one is True else str(one) for one in other}
    return {name: getattr(section, name) for name in sorted(names)}


def _field(default: T, setting: Setting) -> T:
    # The annotated return type is the type of the default, as for dataclasses.field.
    return dataclasses.field(default=default, metadata={_DECLARED: setting})


# Rematerialisation stores no results, the results of all matrix products, or the results of matrix
# products of activations with weights (and not of products between activations).
RematPolicy = Literal["nothing", "products", "products_with_weights"]
