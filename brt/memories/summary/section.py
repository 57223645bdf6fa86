"""Settings of summary layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection

_SHORT, _LONG = "summary", "long_summary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summaries(KindSection):
    """Settings of the layers of MELODI, which summarise every block for the layer above and for the
    next block.

    The section places two kinds of layers, with and without a long-term memory, because all of them
    must have the same number of summaries.
    """

    kind: ClassVar[str] = _SHORT

    layers: tuple[int, ...] = adaptable(())  # Indices of layers without a long-term memory.
    long_layers: tuple[int, ...] = adaptable(())  # Indices of layers with a long-term memory.
    summaries: int = adaptable(128)  # Number of vectors that summarise a block for the layer above.
    short_memory: int = adaptable(128)  # Number of vectors that a block hands to the next.
    long_memory: int = adaptable(8192)  # Number of vectors in the long-term memory.
    long_increment: int = adaptable(64)  # Number of vectors that a block adds to it.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "summaries", "short_memory", "long_memory", "long_increment")
        check(
            not self.long_layers or self.long_memory % self.long_increment == 0,
            f"Summaries.long_memory = {self.long_memory} must be a multiple of "
            f"Summaries.long_increment = {self.long_increment}",
        )

    def places(self) -> dict[str, tuple[int, ...]]:
        """Returns the layers of both kinds."""
        return {_SHORT: self.layers, _LONG: self.long_layers}

    def field_of(self, kind: str) -> str:
        """See the base class."""
        return "Summaries.long_layers" if kind == _LONG else "Summaries.layers"

    def check_model(self, model: Model) -> None:
        """Refuses rotary positions and feedback."""
        for kind, layers in self.places().items():
            check(
                not layers or model.positions != "rotary",
                "Model.positions = 'rotary' has no positions for the vectors of "
                f"{self.field_of(kind)} = {layers}; use 't5', 'alibi' or 'none'",
            )
            check(
                not layers or not model.feedback,
                "Model.feedback = True lets every layer attend to recurrent states, which "
                f"{self.field_of(kind)} = {layers} cannot; set it to False",
            )
