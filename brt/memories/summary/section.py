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

    The section is for two kinds of layers. The kinds share a section because all layers must have
    the same number of summaries.
    """

    kind: ClassVar[str] = _SHORT

    # The layers with these indices are summary layers without a long-term memory.
    layers: tuple[int, ...] = adaptable(())
    # The layers with these indices are summary layers with a long-term memory.
    long_layers: tuple[int, ...] = adaptable(())
    summaries: int = adaptable(128)  # This many vectors summarise a block for the layer above.
    short_memory: int = adaptable(128)  # A block passes this many vectors to the next block.
    long_memory: int = adaptable(8192)  # The long-term memory has this many vectors.
    long_increment: int = adaptable(64)  # A block adds this many vectors to the long-term memory.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "summaries", "short_memory", "long_memory", "long_increment")
        check(
            not self.long_layers or self.long_memory % self.long_increment == 0,
            f"Summaries.long_memory = {self.long_memory} must be a multiple of "
            f"Summaries.long_increment = {self.long_increment}",
        )

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        return {_SHORT: self.layers, _LONG: self.long_layers}

    def field_of(self, kind: str) -> str:
        return "Summaries.long_layers" if kind == _LONG else "Summaries.layers"

    def check_model(self, model: Model) -> None:
        """Refuses rotary positions and `Model.feedback`."""
        for kind, layers in self.layers_by_kind().items():
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
