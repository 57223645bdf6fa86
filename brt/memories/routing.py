"""Layers in which some heads attend to tokens with similar queries, by clusters of queries (Routing
Transformer, arXiv 2003.05997).

A routed head divides the tokens into clusters by their queries. A cluster consists of the tokens
whose queries are nearest to the cluster's centroid. The other heads attend to a window. In shapes,
G is the number of routed heads, C of clusters of a routed head, and R of tokens of a cluster that a
token reads. The other letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.config.checks import check
from brt.config.fields import adaptable, inherited
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import INTO_HEADS, kernel_init, parameter
from brt.layers.cache import closed_window, with_cache
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_feedback, refuse_rotary, require_cache
from brt.layers.state import (
    Given,
    LayerAux,
    LayerOutput,
    WindowState,
    open_block,
    state_array,
    window_state,
    with_token,
)
from brt.layers.window import WindowLayer, window_flops
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

# The centroids are moving averages of queries. Each train step multiplies the old averages by this
# factor.
DECAY = 0.999
COMMITMENT_WEIGHT = 1e-4  # The weight of the loss that keeps queries close to their centroids.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing(KindSection):
    """Settings of layers of a causal Routing Transformer, in which some heads attend to the tokens
    of a cluster instead of a window.
    """

    kind: ClassVar[str] = "routing"
    positive: ClassVar[tuple[str, ...]] = ("heads", "clusters", "keep")

    layers: tuple[int, ...] = inherited(())  # The layers with these indices are of this kind.
    # This many heads of a layer attend to clusters. The other heads attend to a window.
    heads: int = inherited(2)
    clusters: int = inherited(16)  # Each head that attends to clusters has this many clusters.
    # A token attends to this many of the last tokens of its cluster.
    keep: int = adaptable(512)

    def check_model(self, model: Model) -> None:
        """Requires a head with a window, no rotary positions, a cache, and no `Model.feedback`."""
        name, layers = "Routing.layers", self.layers
        check(
            not layers or self.heads < model.heads,
            f"Routing.heads = {self.heads} leaves none of Model.heads = {model.heads} for a "
            f"window; set it to {model.heads - 1} at most",
        )
        refuse_rotary(
            model, layers, f"rotates the queries that {name} = {layers} assign to clusters"
        )
        require_cache(model, name, layers, "tokens that left the window")
        refuse_feedback(model, name, layers)


class RoutedState(NamedTuple):
    """The cache of the windowed heads, and the `Rings` (last R tokens) of every cluster."""

    window: WindowState
    keys: Float[Array, "B G C R K"]  # Unit vectors.
    values: Float[Array, "B G C R K"]
    filled: Int[Array, "B G C"]

    @property
    def rings(self) -> Rings:
        return Rings(*self[1:])


def _of_windows(model: Model) -> Model:
    # Returns the settings of a sliding-window layer that has only the windowed heads.
    section = model.of(Routing)
    return dataclasses.replace(model.without(Routing), heads=model.heads - section.heads)


def routed_state(model: Model) -> RoutedState:
    section = model.of(Routing)
    clusters, names = (section.heads, section.clusters), ("heads", None)
    kept = state_array((*clusters, section.keep, model.head_dim), (*names, None, None))
    filled = state_array(clusters, names, "int32")
    return RoutedState(window_state(_of_windows(model)), kept, kept, filled)


def new_routing(model: Model) -> ClusterStatistics:
    section = model.of(Routing)
    return new_statistics(section.heads, section.clusters, model.head_dim)


def routing_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer.

    They are the FLOPs of a sliding-window layer with two changes in the routed heads. The
    assignment of tokens to clusters and the attention to the tokens of a cluster are added. The
    attention to a window and the projection to keys are subtracted.
    """
    section = model.of(Routing)
    m, width = model, section.heads * model.head_dim
    reading = 2 * width * section.clusters + 4 * width * section.keep
    return window_flops(m) + reading - 4 * width * m.window - 2 * m.model_dim * width


class RoutingLayer(WindowLayer):
    """A layer with windowed heads and routed heads.

    In a routed head, a token belongs to the cluster whose centroid has the largest cosine to the
    token's query. The token attends to the last tokens of this cluster, including itself unless
    `Window.attend_to_self` is False (`brt.memories.routed_attention`). The query is also
    the token's key. With T5's position bias, distances are counted in tokens of the cluster. The
    model state is the statistics of the clusters, from which the centroids are computed.
    """

    def setup(self) -> None:
        m, section = self.model, self.model.of(Routing)
        self.section = section
        self.tokens = TransformerBlock(_of_windows(m), False, self.training, self.kernels)
        by_head = (m.model_dim, section.heads, m.head_dim)
        self.queries = parameter(self, "routed_queries", by_head, INTO_HEADS)
        self.values = parameter(self, "routed_values", by_head, INTO_HEADS)
        self.output = parameter(
            self, "routed_output", (*by_head[1:], m.model_dim), ("heads", "head_dim", "embed"),
            kernel_init(inputs=2, variance=section.heads / m.heads),
        )  # fmt: skip
        scale = nn.initializers.constant(m.attention.scale_init)
        self.scale = parameter(self, "routed_scale", by_head[1:2], ("heads",), scale)
        if m.positions == "t5":
            self.relative_bias = parameter(
                self, "routed_bias", (section.heads, m.relative_buckets), ("heads", "buckets"),
                nn.initializers.normal(m.relative_buckets**-0.5),
            )  # fmt: skip

    def _bias(self) -> Float[Array, "G R"]:
        m, section = self.model, self.section
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

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Adds the routed heads' outputs to the residual, and the tokens to the model state."""
        m, statistics = self.model, given.model_state
        projections = self.tokens.project(x)
        past, window = with_cache(m, given, projections)
        queries, routed = self._routed(x, statistics)
        # The axis of tokens has the name None and is not sharded, because every device has to sort
        # the tokens of the complete segment.
        heads = ("lanes", None, "heads", None)
        queries = constrain(queries, *heads)
        routed = RoutedTokens(
            constrain(routed.keys, *heads), constrain(routed.values, *heads),
            constrain(routed.clusters, *heads[:3]),
        )  # fmt: skip
        start = constrain(given.document_start, "lanes", None)
        read = routed_attention(
            queries, routed, given.state.rings, start, self._bias(),
            attend_to_self=m.sliding.attend_to_self, implementation=self.kernels.routed_attention,
        )  # fmt: skip
        # The layer adds the outputs of all heads to x. This line adds the output of the routed
        # heads, and `attend` adds the output of the windowed heads.
        x = projections.residual + dense(read, self.output, inputs=2)
        y = self.tokens.attend(projections, past, None, residual=x)
        rings = rings_after(routed, given.state.rings, start)
        return LayerOutput(y, RoutedState(window, *rings), self._aux(routed, statistics))

    def _aux(self, routed: RoutedTokens, statistics: ClusterStatistics) -> LayerAux:
        after = add_tokens(statistics, routed.keys, routed.clusters)
        counts = after.new_counts - statistics.new_counts
        largest = jnp.max(counts / routed.clusters[..., 0].size, axis=-1)
        metrics = {"largest_cluster": jnp.mean(largest)}
        loss = COMMITMENT_WEIGHT * commitment(routed.keys, routed.clusters, statistics)
        return LayerAux(after, {"routing": loss}, metrics)

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        shape = (len(given.state.keys), self.model.window, self.section.heads, self.model.head_dim)
        keys = jnp.zeros(shape, given.state.keys.dtype)
        routed = RoutedTokens(keys, keys, jnp.zeros(shape[:3], jnp.int32))
        return LayerOutput(x, open_block(given, routed))

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        queries, routed = self._routed(x, given.model_state)
        whole = with_token(given.block.memory, routed, given.position)
        read = routed_attention_step(
            queries, routed.clusters[:, 0], whole, given.state.rings, given.position, self._bias(),
            attend_to_self=self.model.sliding.attend_to_self,
        )  # fmt: skip
        y, block = self.tokens.attend_step(
            x + dense(read, self.output, inputs=2), given, projections=self.tokens.project(x)
        )
        return LayerOutput(y, block._replace(memory=whole))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Makes the open block the cache, and adds its tokens to the rings of their clusters."""
        nowhere = jnp.zeros((len(given.state.keys), 1), bool)
        window = closed_window(self.model, given)
        rings = rings_after(given.block.memory, given.state.rings, nowhere)
        return LayerOutput(x, RoutedState(window, *rings))


register_kind(
    "routing",
    LayerKind(
        RoutingLayer, routed_state, {"cache": ("window",), "memory": ("keys", "values", "filled")},
        routing_flops, Routing, new_model_state=new_routing,
        settle=lambda model, statistics: update_averages(statistics, DECAY),
    ),
)  # fmt: skip
