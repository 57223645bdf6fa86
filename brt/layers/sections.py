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

    # indices of the recurrent layers, from 0; -3 is the third last layer
    layers: tuple[int, ...] = adaptable(())
    states: int = adaptable(512)  # number of state vectors of a layer
    # standard deviation of the initial identities, which are added to states of size 1
    id_init: float = adaptable(1.0)
    gate: Literal["fixed", "lstm", "gru"] = adaptable("fixed")
    gate_layout: Literal["dual", "single", "skip"] = adaptable("skip")
    # mean of the gate's initial bias; above 0, states are kept longer
    gate_bias: float = adaptable(0.0)
    # instead of gate_bias: initially, channels keep states for 1 to this many blocks (chrono
    # initialisation); 0: all channels start alike
    gate_horizon: float = adaptable(0.0)
    # which gates bound their update by tanh; original: the single layout, paper: lstm
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

    layers: tuple[int, ...] = adaptable(())  # indices of the layers of this kind
    clusters: int = adaptable(64)  # clusters of queries per head
    top_k: int = adaptable(16)  # keys of the past that a centroid keeps; all others are summed up
    # True: attention to the sums accounts for the variance of queries around their centroid
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
