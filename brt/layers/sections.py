"""Settings of the kinds of layers of the papers: recurrent and clustered layers."""

import dataclasses
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence(KindSection):
    """Settings of block-recurrent layers, which attend to state vectors and update them once per
    block.
    """

    kind: ClassVar[str] = "recurrent"

    # Indices of the recurrent layers, counted from 0; -3 is the third last layer.
    layers: tuple[int, ...] = adaptable(())
    states: int = adaptable(512)  # Number of state vectors of a layer.
    # Standard deviation of the initial identities: vectors that tell the states apart and are added
    # to the normalised states.
    id_init: float = adaptable(1.0)
    # Kind of gate that decides how much of a state is kept: a learned constant (fixed), or computed
    # from the update as in an LSTM or a GRU.
    gate: Literal["fixed", "lstm", "gru"] = adaptable("fixed")
    # Where the gates stand: after attention and after an MLP (dual), once after both (single), or
    # after attention without an MLP (skip).
    gate_layout: Literal["dual", "single", "skip"] = adaptable("skip")
    # Mean of the gate's initial bias. With a value above 0, states are kept longer at first.
    gate_bias: float = adaptable(0.0)
    # Largest number of blocks for which a channel keeps its state at first; the channels are spread
    # from 1 block to this number (chrono initialisation). 0 uses gate_bias for all channels.
    gate_horizon: float = adaptable(0.0)
    # Which gates bound their update by tanh: those of the single layout, as in the original code,
    # or those of kind lstm, as in the paper.
    gate_tanh: Literal["original", "paper"] = adaptable("original")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "states", "id_init")
        check(
            self.gate_horizon == 0 or self.gate_horizon > 1,
            f"Recurrence.gate_horizon = {self.gate_horizon} must be above 1 block, or 0",
        )
        check(
            self.gate_horizon == 0 or self.gate_bias == 0,
            f"Recurrence.gate_horizon = {self.gate_horizon} replaces Recurrence.gate_bias = "
            f"{self.gate_bias}; set one of them to 0",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clustered(KindSection):
    """Settings of causal clustered layers, which attend to the whole past by clusters
    of queries.
    """

    kind: ClassVar[str] = "clustered"

    layers: tuple[int, ...] = adaptable(())  # Indices of the layers of this kind.
    clusters: int = adaptable(64)  # Number of clusters of queries per head.
    # Number of keys of the past that each centroid keeps; all others are summed up.
    top_k: int = adaptable(16)
    # True corrects attention to the sums for the variance of queries around their centroid.
    jensen: bool = adaptable(True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "clusters", "top_k")

    def check_model(self, model: Model) -> None:
        """Refuses rotary positions and models without a cache."""
        check(
            not self.layers or model.positions != "rotary",
            "Model.positions = 'rotary' rotates the queries that Clustered.layers = "
            f"{self.layers} assign to clusters; use 't5', 'alibi' or 'none'",
        )
        check(
            not self.layers or model.cache,
            f"Clustered.layers = {self.layers} attend to tokens that left the window, which needs "
            "Model.cache = True",
        )
