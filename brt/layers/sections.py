"""Settings of recurrent layers and of clustered layers, and checks of the model's settings that
several kinds of layers need.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal

from brt.config import Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection


def refuse_feedback(model: Model, field: str, layers: Sequence[int]) -> None:
    """Raises ConfigError if `Model.feedback` is set and the setting `field` lists any `layers`,
    because these layers cannot attend to recurrent states.
    """
    check(
        not layers or not model.feedback,
        "Model.feedback = True lets every layer attend to recurrent states, which "
        f"{field} = {layers} cannot; set it to False",
    )


def refuse_rotary(model: Model, layers: Sequence[int], reason: str) -> None:
    """Raises ConfigError if there are `layers` and positions are rotary. The error message gives
    the `reason`.
    """
    check(
        not layers or model.positions != "rotary",
        f"Model.positions = 'rotary' {reason}; use 't5', 'alibi' or 'none'",
    )


def require_cache(model: Model, field: str, layers: Sequence[int], read: str) -> None:
    """Raises ConfigError if the model has no cache, but the setting `field` lists `layers`, which
    need it. `read` says what these layers read from the cache.
    """
    check(
        not layers or model.sliding.cache,
        f"{field} = {layers} attend to {read}, which needs Window.cache = True",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recurrence(KindSection):
    """Settings of block-recurrent layers, whose state vectors are updated once per block."""

    kind: ClassVar[str] = "recurrent"
    grouped_keys: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("states", "id_init")

    # The layers with these indices are recurrent. Index 0 is the lowest layer, and -3 is the third
    # layer from the top.
    layers: tuple[int, ...] = adaptable(())
    states: int = adaptable(512)  # A layer has this many state vectors.
    # Each state has a learned identity, a vector that is added to the normalised state and tells
    # the states apart. This is the standard deviation of the initial identities.
    id_init: float = adaptable(1.0)
    # The output of the tokens' attention to states is multiplied by a kernel. The kernel is
    # initialised with random numbers (random), or with zeros (zero), with which the initial model
    # computes the same as a model without recurrence.
    output_init: Literal["random", "zero"] = adaptable("random")
    # A gate decides how much of a state is kept. The gate is a learned constant (fixed), or is
    # computed from the update as in an LSTM (lstm) or a GRU (gru).
    gate: Literal["fixed", "lstm", "gru"] = adaptable("fixed")
    # The layout says where the gates are: one after attention and one after an MLP (dual), one
    # after both together (single), or one after attention without an MLP (skip).
    gate_layout: Literal["dual", "single", "skip"] = adaptable("skip")
    # This is the mean of the gate's initial bias. With a value above 0, states are kept longer at
    # the start of training.
    gate_bias: float = adaptable(0.0)
    # At the start of training, a channel keeps its state for a number of blocks that is drawn
    # between 1 and this number (chrono initialisation). 0 uses gate_bias for all channels instead.
    gate_horizon: float = adaptable(0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """Settings of causal clustered layers, in which queries are divided into clusters, and old
    tokens are read through the centroid of a query's cluster.
    """

    kind: ClassVar[str] = "clustered"
    positive: ClassVar[tuple[str, ...]] = ("clusters", "top_k")

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are clustered.
    clusters: int = adaptable(64)  # The queries of a head are divided into this many clusters.
    # A centroid is the vector that stands for a cluster of queries. Each centroid keeps this many
    # keys of the past, and a weighted sum of the values of all other keys.
    top_k: int = adaptable(16)

    def check_model(self, model: Model) -> None:
        name, layers = "Clustered.layers", self.layers
        refuse_rotary(
            model, layers, f"rotates the queries that {name} = {layers} assign to clusters"
        )
        require_cache(model, name, layers, "tokens that left the window")
