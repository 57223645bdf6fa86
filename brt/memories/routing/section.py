"""Settings of routing layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_not_negative, check_positive
from brt.config.fields import adaptable, free, inherited
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing(KindSection):
    """Settings of layers of a causal Routing Transformer, some of whose heads attend to a token's
    cluster.
    """

    kind: ClassVar[str] = "routing"

    layers: tuple[int, ...] = inherited(())  # indices of the layers of this kind
    heads: int = inherited(2)  # heads of a layer that attend to clusters; the others have a window
    clusters: int = inherited(16)  # clusters of each of these heads
    keep: int = adaptable(512)  # most recent tokens of its cluster that a token attends to
    # decay per step of the moving averages that are the centroids
    decay: float = free(0.999)
    commitment: float = free(1e-4)  # weight of the loss for the distance of queries to centroids

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "heads", "clusters", "keep")
        check_not_negative(self, "commitment")
        check(0 < self.decay < 1, f"Routing.decay = {self.decay} must be in (0, 1)")

    def check_model(self, model: Model) -> None:
        """Refuses layers without windowed heads, rotary positions, feedback, and no cache."""
        if not self.layers:
            return
        check(
            self.heads < model.heads,
            f"Routing.heads = {self.heads} leaves none of Model.heads = {model.heads} for a "
            f"window; set it to {model.heads - 1} at most",
        )
        check(
            model.positions != "rotary",
            "Model.positions = 'rotary' rotates the queries that Routing.layers = "
            f"{self.layers} assign to clusters; use 't5', 'alibi' or 'none'",
        )
        check(
            model.cache,
            f"Routing.layers = {self.layers} attend to tokens that left the window, which needs "
            "Model.cache = True",
        )
        check(
            not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"Routing.layers = {self.layers} cannot; set it to False",
        )
