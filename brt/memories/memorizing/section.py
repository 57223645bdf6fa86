"""Settings of memorizing layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorizing(KindSection):
    """Settings of layers that attend to a few tokens of a long memory, which a search selects for
    each query.
    """

    kind: ClassVar[str] = "memorizing"

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    neighbors: int = adaptable(128)  # A query reads this many tokens of the memory.
    # The memory is searched exactly (exact), or approximately with one result from each of
    # `neighbors` buckets (bucketed), as in the original code.
    search: Literal["exact", "bucketed"] = adaptable("exact")

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

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if a segment of `length` tokens is longer than the memory.

        `name` is the name of the setting with the length, for the message.
        """
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )
