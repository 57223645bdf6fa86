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
    """Settings of layers that attend to the results of a search in a long memory."""

    kind: ClassVar[str] = "memorizing"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    neighbors: int = adaptable(128)  # A query reads this many tokens of the memory.
    # "exact" finds the tokens whose keys have the largest products with the query. "bucketed"
    # divides the memory into `neighbors` buckets and finds the best token of each bucket, as the
    # authors' code does.
    search: Literal["exact", "bucketed"] = adaptable("exact")
    # A gate for each head mixes attention to the memory and attention to the window. With the gate
    # of the paper, "sigmoid", the layer has no positions, and the gate is half open in a new model.
    # With "tanh", the window has the model's positions, and the gate is closed in a new model,
    # which therefore computes the same as the model without a memory.
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
        check_reach("Memorizing.layers", self.layers, model)

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if a segment, of the length in setting `name`, exceeds the memory."""
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )
