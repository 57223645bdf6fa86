"""Settings of dense-memory layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMemory(KindSection):
    """Settings of layers that attend, with one softmax, to their own block and to every token of a
    memory of past tokens.
    """

    kind: ClassVar[str] = "dense_memory"

    layers: tuple[int, ...] = adaptable(())  # Indices of the layers of this kind.
    size: int = adaptable(32768)  # Number of tokens in the memory.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")

    def check_model(self, model: Model) -> None:
        """Refuses feedback, whose states these layers cannot read."""
        check(
            not self.layers or not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"DenseMemory.layers = {self.layers} cannot; set it to False",
        )
