"""Settings of routing layers."""

import dataclasses
from typing import ClassVar

from brt.config import Model
from brt.config.checks import check, check_not_negative, check_positive
from brt.config.fields import adaptable, free, inherited
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing(KindSection):
    """Settings of layers of a causal Routing Transformer, in which some heads attend to the tokens
    of a cluster instead of a window.
    """

    kind: ClassVar[str] = "routing"

    layers: tuple[int, ...] = inherited(())  # The layers with these indices are of this kind.
    # This many heads of a layer attend to clusters. The other heads attend to a window.
    heads: int = inherited(2)
    clusters: int = inherited(16)  # Each head that attends to clusters has this many clusters.
    # A token attends to this many of the last tokens of its cluster.
    keep: int = adaptable(512)
    # The centroids are moving averages of queries. Each train step multiplies the old averages by
    # this factor.
    decay: float = free(0.999)
    # This is the weight of the auxiliary loss that keeps queries close to their centroids.
    commitment: float = free(1e-4)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "heads", "clusters", "keep")
        check_not_negative(self, "commitment")
        check(0 < self.decay < 1, f"Routing.decay = {self.decay} must be in (0, 1)")

    def check_model(self, model: Model) -> None:
        """Requires a head with a window, no rotary positions, a cache, and no `Model.feedback`."""
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
            model.sliding.cache,
            f"Routing.layers = {self.layers} attend to tokens that left the window, which needs "
            "Window.cache = True",
        )
        check(
            not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"Routing.layers = {self.layers} cannot; set it to False",
        )
