"""Layers in which some heads attend to tokens with similar queries, by clusters of queries (Routing
Transformer, arXiv 2003.05997).
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.config.checks import check, check_not_negative, check_positive
from brt.config.fields import adaptable, free, inherited
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import INTO_HEADS, kernel_init, parameter
from brt.layers.cache import closed_window, with_cache
from brt.layers.flops import window_flops
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.state import (
    WINDOW_AXES,
    LayerAux,
    LayerOutput,
    OpenBlock,
    WindowState,
    new_window_state,
    open_block,
)
from brt.memories.routed_attention import (
    ClusterStatistics,
    Rings,
    RoutedTokens,
    add_tokens,
    commitment,
    nearest_clusters,
    new_statistics,
    rings_after,
    routed_attention,
    routed_attention_step,
    update_averages,
)
from brt.ops.dense import dense
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.positions import relative_bias

# Settings of routing layers.


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


# The routing layer: some heads attend to a token's window, and the other heads, the routed heads,
# attend to the last tokens of the token's cluster.
#
# A routed head divides the tokens into clusters by their queries. A cluster consists of the tokens
# whose queries are nearest to the cluster's centroid. In shapes, G is the number of routed heads, C
# of clusters of a routed head, and R of tokens of a cluster that a token reads. The other letters
# of shapes are those of `brt.layers.state`.


class RoutedState(NamedTuple):
    """The cache of the windowed heads, and the `Rings` (last R tokens) of every cluster."""

    window: WindowState
    keys: Float[Array, "B G C R K"]  # Unit vectors.
    values: Float[Array, "B G C R K"]
    filled: Int[Array, "B G C"]

    @property
    def rings(self) -> Rings:
        return Rings(*self[1:])


class RoutedBlock(NamedTuple):
    """An open block: keys and values of the windowed heads, and tokens of the routed heads."""

    tokens: OpenBlock
    routed: RoutedTokens


_RINGS = ("lanes", "heads", None, None, None)
ROUTED_AXES: Any = RoutedState(WINDOW_AXES, _RINGS, _RINGS, _RINGS[:3])


def _of_windows(model: Model) -> Model:
    # Returns the settings of a sliding-window layer that has only the windowed heads.
    section = model.of(Routing)
    return dataclasses.replace(model.without(Routing), heads=model.heads - section.heads)


def new_routed_state(model: Model, batch: int, dtype: jnp.dtype) -> RoutedState:
    section = model.of(Routing)
    m = model
    shape = (batch, section.heads, section.clusters, section.keep, m.head_dim)
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    window = new_window_state(_of_windows(m), batch, dtype)
    return RoutedState(window, keys, values, jnp.zeros(shape[:3], jnp.int32))


def new_routing(model: Model) -> ClusterStatistics:
    section = model.of(Routing)
    return new_statistics(section.heads, section.clusters, model.head_dim)


def settled_routing(model: Model, statistics: ClusterStatistics) -> ClusterStatistics:
    return update_averages(statistics, model.of(Routing).decay)


def routing_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, plus assigning tokens to clusters and
    attention to the tokens of a cluster, minus attention to a window and the projection to keys,
    which routed heads lack.
    """
    section = model.of(Routing)
    m, width = model, section.heads * model.head_dim
    reading = 2 * width * section.clusters + 4 * width * section.keep
    return window_flops(m) + reading - 4 * width * m.window - 2 * m.model_dim * width


class RoutingLayer(nn.Module):
    """A layer with windowed heads and routed heads.

    In a routed head, a token belongs to the cluster whose centroid has the largest cosine to the
    token's query. The token attends to the last tokens of this cluster, including itself unless
    `Window.attend_to_self` is False (`brt.memories.routed_attention`). The query is also
    the token's key. With T5's position bias, distances are counted in tokens of the cluster. The
    model state is the statistics of the clusters, from which the centroids are computed.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        section = self.model.of(Routing)
        m = self.model
        self.tokens = TransformerBlock(_of_windows(m), training=self.training, kernels=self.kernels)
        by_head = (m.model_dim, section.heads, m.head_dim)
        self.queries = parameter(self, "routed_queries", by_head, INTO_HEADS)
        self.values = parameter(self, "routed_values", by_head, INTO_HEADS)
        self.output = parameter(
            self, "routed_output", (*by_head[1:], m.model_dim), ("heads", "head_dim", "embed"),
            kernel_init(inputs=2, variance=section.heads / m.heads),
        )  # fmt: skip
        self.scale = parameter(
            self,
            "routed_scale",
            by_head[1:2],
            ("heads",),
            nn.initializers.constant(m.attention.scale_init),
        )
        if m.positions == "t5":
            self.relative_bias = parameter(
                self, "routed_bias", (section.heads, m.relative_buckets), ("heads", "buckets"),
                nn.initializers.normal(m.relative_buckets**-0.5),
            )  # fmt: skip

    def _bias(self) -> Float[Array, "G R"]:
        section = self.model.of(Routing)
        m = self.model
        if m.positions != "t5":
            return jnp.zeros((section.heads, section.keep), jnp.float32)
        bias = relative_bias(
            self.relative_bias, window=section.keep, attend_to_self=m.sliding.attend_to_self,
            max_distance=m.relative_max_distance,
        )  # fmt: skip
        return bias * jnp.abs(self.scale)[:, None] if m.attention.bias_before_scale else bias

    def _routed(
        self, x: Float[Array, "B T D"], statistics: ClusterStatistics
    ) -> tuple[Float[Array, "B T G K"], RoutedTokens]:
        # Keys of the routed heads are normalized queries.
        h = self.tokens.normed(x)
        products = dense(h, self.queries)
        keys, values = l2_normalize(products), dense(h, self.values)
        queries = scaled_unit(products, jnp.abs(self.scale))
        return queries, RoutedTokens(keys, values, nearest_clusters(keys, statistics))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: RoutedState,
        document_start: Bool[Array, "B N"],
        model_state: ClusterStatistics,
        **_: Any,
    ) -> LayerOutput:
        """Adds the routed heads' outputs to the residual, and the tokens to the model state."""
        m, statistics = self.model, model_state
        projections = self.tokens.project(x)
        past, window = with_cache(m, state.window, projections, document_start)
        queries, routed = self._routed(x, statistics)
        # The axis of tokens has the name None, so it is not sharded: every device sorts the tokens
        # of the complete segment.
        heads = ("lanes", None, "heads", None)
        queries = constrain(queries, *heads)
        routed = RoutedTokens(
            constrain(routed.keys, *heads), constrain(routed.values, *heads),
            constrain(routed.clusters, *heads[:3]),
        )  # fmt: skip
        start = constrain(document_start, "lanes", None)
        read = routed_attention(
            queries, routed, state.rings, start, self._bias(),
            attend_to_self=m.sliding.attend_to_self, implementation=self.kernels.routed_attention,
        )  # fmt: skip
        # The layer adds the outputs of all heads to x. This line adds the output of the routed
        # heads, and `attend` adds the output of the windowed heads.
        x = projections.residual + dense(read, self.output, inputs=2)
        y = self.tokens.attend(projections, past, None, residual=x)
        rings = rings_after(routed, state.rings, start)
        return LayerOutput(y, RoutedState(window, *rings), self._aux(routed, statistics))

    def _aux(self, routed: RoutedTokens, statistics: ClusterStatistics) -> LayerAux:
        section = self.model.of(Routing)
        after = add_tokens(statistics, routed.keys, routed.clusters)
        counts = after.new_counts - statistics.new_counts
        largest = jnp.max(counts / routed.clusters[..., 0].size, axis=-1)
        metrics = {"largest_cluster": jnp.mean(largest)}
        weight = section.commitment
        if weight == 0:
            return LayerAux(after, metrics=metrics)
        loss = weight * commitment(routed.keys, routed.clusters, statistics)
        return LayerAux(after, {"routing": loss}, metrics)

    def begin_block(self, x: None, *, state: RoutedState, **_: Any) -> LayerOutput:
        section = self.model.of(Routing)
        window, m = state.window, self.model
        shape = (len(state.keys), m.window, section.heads, m.head_dim)
        keys = jnp.zeros(shape, state.keys.dtype)
        routed = RoutedTokens(keys, keys, jnp.zeros(keys.shape[:3], jnp.int32))
        return LayerOutput(x, RoutedBlock(open_block(window), routed))

    def prepare_block(
        self, x: None, *, block: RoutedBlock, position: Int[Array, ""], **_: Any
    ) -> LayerOutput:
        return LayerOutput(x, block._replace(tokens=self.tokens.prepared(block.tokens, position)))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: RoutedState,
        block: RoutedBlock,
        position: Int[Array, ""],
        model_state: ClusterStatistics,
        **_: Any,
    ) -> LayerOutput:
        queries, routed = self._routed(x, model_state)
        whole = RoutedTokens(
            *(
                jax.lax.dynamic_update_slice_in_dim(old, new, position, axis=1)
                for old, new in zip(block.routed, routed, strict=True)
            )
        )
        read = routed_attention_step(
            queries, routed.clusters[:, 0], whole, state.rings, position, self._bias(),
            attend_to_self=self.model.sliding.attend_to_self,
        )  # fmt: skip
        y, tokens = self.tokens.attend_step(
            x + dense(read, self.output, inputs=2), state.window, block.tokens, position, None,
            projections=self.tokens.project(x),
        )  # fmt: skip
        return LayerOutput(y, RoutedBlock(tokens, whole))

    def end_block(
        self, x: None, *, state: RoutedState, block: RoutedBlock, **_: Any
    ) -> LayerOutput:
        """Makes the block the cache; its tokens become the last tokens of their clusters."""
        nowhere = jnp.zeros((len(state.keys), 1), bool)
        window = closed_window(self.model, state.window, block.tokens)
        rings = rings_after(block.routed, state.rings, nowhere)
        return LayerOutput(x, RoutedState(window, *rings))


register_kind(
    "routing",
    LayerKind(
        RoutingLayer,
        new_routed_state,
        lambda model: ROUTED_AXES,
        {"cache": ("window",), "memory": ("keys", "values", "filled")},
        routing_flops,
        Routing,
        new_model_state=new_routing,
        settle=settled_routing,
    ),
)
