"""Checks of a kind of layer at its registration, which report mistakes before a model is built."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax.linen as nn

from brt.config.fields import is_declared
from brt.config.kinds import KindSection
from brt.errors import ConfigError

if TYPE_CHECKING:
    from brt.layers.kinds import LayerKind

# A state consists of these parts, each of which evaluation can reset or exchange.
STATE_PARTS = ("state", "cache", "memory")
# The first fields of every layer's module, in the order in which brt passes them.
_FIELDS = ("model", "training", "kernels")
# The class variables of a section.
_CONSTANTS = ("kind", "any_window", "grouped_keys")
# The keywords that brt passes to each method of a layer.
_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "__call__": ("state", "document_start", "feedback", "summaries", "model_state"),
    "begin_block": ("state", "document_start", "summaries", "model_state"),
    "decode_step": ("state", "block", "position", "feedback", "summaries", "model_state"),
    "end_block": ("state", "block", "summaries", "model_state"),
    "prepare_block": ("block", "position", "summaries", "model_state"),
}
_OPTIONAL = ("prepare_block",)


def check_kind(name: str, kind: "LayerKind") -> None:
    """Raises ConfigError for mistakes in the section, the module or the parts of a kind."""
    for part, fields in kind.parts.items():
        if part not in STATE_PARTS:
            raise ConfigError(
                f"LayerKind.parts of the kind {name!r} has the part {part!r}; the parts of a state "
                f"are {', '.join(map(repr, STATE_PARTS))}"
            )
        if isinstance(fields, str):
            raise ConfigError(
                f"LayerKind.parts of the kind {name!r} has {fields!r} as the fields of the part "
                f"{part!r}; write ({fields!r},), with a comma"
            )
    if kind.section is not None:
        _check_section(name, kind.section)
    elif name != "window":
        raise ConfigError(
            f"the LayerKind {name!r} has no section, so no layer can be of this kind; set "
            "LayerKind.section to a subclass of brt.config.kinds.KindSection"
        )
    _check_module(name, kind.module)


def _check_section(name: str, section: Any) -> None:
    if not (isinstance(section, type) and issubclass(section, KindSection)):
        raise ConfigError(
            f"LayerKind.section of the kind {name!r} is {section!r}; it must be a subclass of "
            "brt.config.kinds.KindSection"
        )
    shown, fields = section.__name__, {field.name: field for field in dataclasses.fields(section)}
    for constant in _CONSTANTS:
        if constant in fields:
            raise ConfigError(
                f"{shown}.{constant} is no setting; annotate it as a class variable, "
                f"`{constant}: ClassVar[...] = ...`"
            )
    if section.layers_by_kind is KindSection.layers_by_kind:
        if not isinstance(getattr(section, "kind", None), str):
            raise ConfigError(
                f"the section {shown} does not say which kind it describes; add the class variable "
                f"`kind: ClassVar[str] = {name!r}`"
            )
        if "layers" not in fields:
            raise ConfigError(
                f"the section {shown} has no field `layers`; decorate the class with "
                "@dataclasses.dataclass(frozen=True, kw_only=True), and declare "
                "`layers: tuple[int, ...] = adaptable(())`"
            )
    for field in fields.values():
        if not is_declared(field):
            raise ConfigError(
                f"no function of brt.config.fields declares the field {field.name} of the section "
                f"{shown}; write, for example, `{field.name}: ... = adaptable(...)`"
            )


def _check_module(name: str, module: Any) -> None:
    if not (isinstance(module, type) and issubclass(module, nn.Module)):
        raise ConfigError(
            f"LayerKind.module of the kind {name!r} is {module!r}; it must be a subclass "
            "of flax.linen.Module"
        )
    shown = f"the module {module.__name__} of the kind {name!r}"
    fields = tuple(field.name for field in dataclasses.fields(module))
    if fields[: len(_FIELDS)] != _FIELDS:
        raise ConfigError(
            f"{shown} must begin with the fields {', '.join(_FIELDS)}, because brt creates it as "
            "module(model, training, kernels); it has the fields "
            f"{', '.join(field for field in fields if field not in ('parent', 'name')) or 'none'}"
        )
    for method, keywords in _KEYWORDS.items():
        # `getattr` would find the `__call__` of the class of classes.
        found = next((vars(one)[method] for one in module.__mro__ if method in vars(one)), None)
        if found is None and method in _OPTIONAL:
            continue
        if not callable(found):
            raise ConfigError(
                f"{shown} has no method {method}; help(brt.layers.kinds.LayerKind) describes the "
                "four methods of a layer"
            )
        parameters = inspect.signature(found).parameters
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
            continue
        if missing := [keyword for keyword in keywords if keyword not in parameters]:
            raise ConfigError(
                f"{shown}: {method} does not accept the keyword {missing[0]!r}, which brt passes "
                "to every kind; add **_ to its parameters"
            )
