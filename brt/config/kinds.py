"""The base class and the registry of the settings of kinds of layers.

Every kind of layer except the sliding window has a section of settings in .gin files, such as
`Recurrence`. The section's class is written next to the layer's Flax module, and both are
registered together (`brt.layers.kinds`). `Model.kinds` contains the sections of the kinds of layers
that a model has.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from brt.config.checks import check, check_finite, check_not_negative, check_positive
from brt.errors import ConfigError

if TYPE_CHECKING:
    from brt.config.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindSection:
    """Base class of the settings of a kind of layer.

    A subclass is a frozen dataclass, whose name is the name of the section in .gin files. The field
    `layers` of the subclass has the indices of the layers of this kind. Negative indices count from
    the last layer. Every field is declared by a function of `brt.config.fields`.
    """

    kind: ClassVar[str]  # The name of the kind is part of the names of the layers' parameters.
    # True if a layer of this kind may see more or fewer tokens than a block has, or has no window.
    any_window: ClassVar[bool] = False
    # True if a layer of this kind supports sinks (`Window.sinks`), and also supports fewer heads of
    # keys than heads of queries (`SelfAttention.kv_heads`).
    grouped_keys: ClassVar[bool] = False
    positive: ClassVar[tuple[str, ...]] = ()  # Fields whose values must be above 0.
    not_negative: ClassVar[tuple[str, ...]] = ()  # Fields whose values must be at least 0.

    def __post_init__(self) -> None:
        check_finite(self)
        check_positive(self, *self.positive)
        check_not_negative(self, *self.not_negative)

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        """Returns the indices of the section's layers by kind, such as {"recurrent": (-3,)}."""
        layers: tuple[int, ...] = getattr(self, "layers", ())
        return {self.kind: layers}

    def field_of(self, kind: str) -> str:
        """Returns the setting that lists the layers of a kind, such as "Recurrence.layers"."""
        return f"{type(self).__name__}.layers"

    def check_model(self, model: "Model") -> None:
        """Raises ConfigError if settings of this section contradict settings of the model."""

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if layers cannot read segments of `length` tokens. `name` is the name
        of the setting with this length, for the message.
        """


_SECTIONS: dict[str, type[KindSection]] = {}


def register_section(section: type[KindSection]) -> None:
    """Allows .gin files and saved configs to have settings of a section."""
    name = section.__name__
    if _SECTIONS.setdefault(name, section) is not section:
        raise ConfigError(f"there are two sections named {name!r}; rename one of them")


def kind_sections() -> Mapping[str, type[KindSection]]:
    if not _SECTIONS:
        raise AssertionError("no kinds of layers are registered: import brt.models first")
    return _SECTIONS


def layer_kinds(kinds: tuple[Any, ...], layers: int) -> tuple[str, ...]:
    """Returns the name of the kind of each layer of a model, lowest layer first.

    Layers that no section names have the kind "window".
    """
    names, fields = ["window"] * layers, [""] * layers
    for field, kind, index, indices in _placements(kinds):
        check(
            -layers <= index < layers,
            f"{field} = {indices} names layer {index}, but Model.layers = {layers} has layers 0 to "
            f"{layers - 1}; set Model.layers to the number of layers, also where the weights of "
            "Training.init_from have more",
        )
        place = index % layers
        check(fields[place] != field, f"{field} = {indices} names a layer twice")
        check(not fields[place], f"{field} = {indices} and {fields[place]} both name layer {place}")
        names[place], fields[place] = kind, field
    return tuple(names)


def _placements(kinds: tuple[Any, ...]) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    for section in kinds:
        for kind, indices in section.layers_by_kind().items():
            for index in indices:
                yield section.field_of(kind), kind, index, indices
