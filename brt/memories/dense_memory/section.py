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

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if there are dense-memory layers and `Model.feedback` is set, because
        these layers cannot attend to recurrent states.
        """
        check(
            not self.layers or not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"DenseMemory.layers = {self.layers} cannot; set it to False",
        )
