"""Settings of memorizing layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.memories.checks import check_reach


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorizing(KindSection):
    """Settings of layers that attend to a few tokens of a long memory, which a search selects for
    each query.
    """

    kind: ClassVar[str] = "memorizing"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    neighbors: int = adaptable(128)  # A query reads this many tokens of the memory.
    # The memory is searched exactly (exact), or approximately with one result from each of
    # `neighbors` buckets (bucketed), as in the original code.
    search: Literal["exact", "bucketed"] = adaptable("exact")
    # A gate of each head mixes what tokens read of the memory and of their window. The gate of the
    # paper (sigmoid) begins half open, and the layer has no positions. The other gate (tanh) begins
    # closed, and the window has the model's positions, so the model begins as the model without a
    # memory.
    gate: Literal["sigmoid", "tanh"] = adaptable("sigmoid")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size", "neighbors")
        check(
            not self.layers or self.neighbors <= self.size,
            f"Memorizing.neighbors = {self.neighbors} must not be above "
            f"Memorizing.size = {self.size}",
        )
        check(
            not self.layers or self.search == "exact" or self.size % self.neighbors == 0,
            f"Memorizing.size = {self.size} must be a multiple of Memorizing.neighbors = "
            f"{self.neighbors} where Memorizing.search = 'bucketed'",
        )

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the window of a memorizing layer is smaller than a block."""
        check_reach("Memorizing.layers", self.layers, model)

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if a segment of `length` tokens is longer than the memory.

        `name` is the name of the setting with the length, for the message.
        """
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )
