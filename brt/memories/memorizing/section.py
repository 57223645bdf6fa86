"""Settings of memorizing layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorizing(KindSection):
    """Settings of layers that attend to those tokens of a long memory that a search for each query
    finds.
    """

    kind: ClassVar[str] = "memorizing"

    layers: tuple[int, ...] = adaptable(())  # Indices of the layers of this kind.
    size: int = adaptable(32768)  # Number of tokens in the memory.
    neighbors: int = adaptable(128)  # Number of tokens of the memory that a query reads.
    # How the memory is searched: exactly, or approximately by buckets, as in the original code.
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
        """Refuses segments that are longer than the memory."""
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )
