"""The clustered layer: sliding-window attention, and attention to the past by clusters of queries.

A centroid is a learned vector that stands for a cluster of similar queries of a head. In shapes, C
is the number of centroids of a head, and R the number of slots in which a centroid keeps keys. The
other letters of shapes are those of `brt.layers.state`.
"""

from typing import NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.layers.attention import Mix
from brt.layers.basic import parameter
from brt.layers.cache import closed_window, with_cache
from brt.layers.sections import Clustered
from brt.layers.state import (
    Given,
    LayerOutput,
    WindowState,
    cache_is_readable,
    state_array,
    window_state,
)
from brt.layers.window import WindowLayer, keys_before, window_flops
from brt.ops.causal_clustered_attention import (
    CentroidMemory,
    Centroids,
    causal_clustered_attention,
    causal_clustered_attention_step,
    memory_after,
    memory_scan,
)
from brt.ops.partial_attention import AttentionPart


class ClusteredState(NamedTuple):
    """The cache, and the keys and values that every centroid remembers of all blocks before the
    cached block. The fields after `window` are those of `CentroidMemory`, in the same order.
    """

    window: WindowState
    # The keys that each centroid keeps, and their values.
    keys: Float[Array, "B H C R K"]
    values: Float[Array, "B H C R K"]
    # For each centroid, the float32 output of its attention to all other keys (`rest`), and the
    # log-sum-exp of the logits of these keys (`totals`).
    rest: Float[Array, "B H C K"]
    totals: Float[Array, "B H C"]
    # How many of the R slots of a centroid hold a key. The number is the same for all centroids of
    # a row.
    filled: Int[Array, " B"]

    @property
    def past(self) -> CentroidMemory:
        return CentroidMemory(*self[1:])


def clustered_state(model: Model) -> ClusteredState:
    section = model.of(Clustered)
    centroids, names = (model.heads, section.clusters), ("heads", None)
    kept = state_array((*centroids, section.top_k, model.head_dim), (*names, None, None))
    return ClusteredState(
        window_state(model),
        kept,
        kept,
        rest=state_array((*centroids, model.head_dim), (*names, None), "float32"),
        totals=state_array(centroids, names, "float32"),
        filled=state_array((), (), "int32"),
    )


def clustered_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer and of the following products.

    A token's query is multiplied with all centroids of its head, with the keys that left the
    window, and with the keys that its centroid keeps. Every centroid attends once to each key of
    the past, and once per block to the keys that it keeps.
    """
    section = model.of(Clustered)
    m, attention = model, 4 * model.heads * model.head_dim
    # For each key of its own block that a token sees, one key of the previous block has left the
    # token's window.
    passed_keys = keys_before(m, m.window)
    reading = attention // 2 * section.clusters + attention * (passed_keys + section.top_k)
    taking_in = attention * section.clusters * (m.window + section.top_k) // m.window
    return window_flops(m) + reading + taking_in


class ClusteredLayer(WindowLayer):
    """A layer of causal clustered attention.

    A token attends to its window as in a sliding-window layer, and also to keys that left the
    window. Of the latter, keys of the previous block are read exactly. Older keys are read through
    the token's centroid, which keeps some of them, and the centroid's attention output over all
    others. Position biases treat all keys that left the window like the farthest key of the window.
    """

    def setup(self) -> None:
        super().setup()
        section, m = self.model.of(Clustered), self.model
        # Initial centroids have the distribution that queries have before they are multiplied by
        # their scale. If queries are normalised, they are unit vectors, and the initial centroids
        # are nearly unit vectors. If queries are not normalised, the entries of the initial
        # centroids have variance 1. `_centroids` multiplies the centroids by the same scale.
        spread = m.head_dim**-0.5 if m.attention.normalize_qk else 1.0
        self.centroids = parameter(
            self, "centroids", (m.heads, section.clusters, m.head_dim), ("heads", "clusters", None),
            nn.initializers.normal(spread),
        )  # fmt: skip
        # In place of the queries of its cluster, a centroid attends to the keys that it does not
        # keep. The queries differ from the centroid, so the mean of their exponentiated logits is
        # larger than the centroid's exponentiated logit (Jensen's inequality). The learned standard
        # deviations of the queries around each centroid correct the centroid's logits for this.
        self.deviations = parameter(
            self, "deviations", (m.heads, section.clusters), ("heads", "clusters"),
            nn.initializers.constant(spread),
        )  # fmt: skip

    def _centroids(self) -> Centroids:
        scale = self.tokens.query_scale()[:, None]
        return Centroids(self.centroids * scale[..., None], (self.deviations * scale) ** 2)

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Computes the memories of all blocks first; then all tokens attend at once."""
        m, centroids = self.model, self._centroids()
        projections = self.tokens.project(x)
        cached, window = with_cache(m, given, projections)
        keys, values = cached.joined(projections)
        keys = self.tokens.normalized_keys(keys)
        cache_mask = cached.cache_mask
        implementation = self.kernels.causal_clustered_attention
        past, pasts = memory_scan(
            keys, values, cache_mask, given.state.past, centroids, implementation=implementation
        )

        def attend_beyond_window(queries: Array, part: AttentionPart) -> Array:
            return causal_clustered_attention(
                queries, part, keys, values, cache_mask, pasts, centroids, self.tokens.far_bias(),
                attend_to_self=m.sliding.attend_to_self, implementation=implementation,
            )  # fmt: skip

        y = self.tokens.attend(projections, cached, given.feedback, attend_beyond_window)
        return LayerOutput(y, ClusteredState(window, *past))

    def mix_step(self, given: Given) -> Mix:
        m, window = self.model, given.state.window

        def attend_beyond_window(queries: Array, part: AttentionPart) -> Array:
            return causal_clustered_attention_step(
                queries, part, self.tokens.normalized_keys(window.keys), window.values,
                cache_is_readable(m, window), given.position,
                given.state.past, self._centroids(), self.tokens.far_bias(),
                attend_to_self=m.sliding.attend_to_self,
            )  # fmt: skip

        return attend_beyond_window

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Makes the open block the cache, and adds the old cache to the centroids' memory."""
        state = given.state
        keys = self.tokens.normalized_keys(state.window.keys)
        keys, values = (z.swapaxes(1, 2) for z in (keys, state.window.values))
        cache_mask = cache_is_readable(self.model, state.window)
        past = memory_after(state.past, keys, values, cache_mask, self._centroids())
        window = closed_window(self.model, given)
        return LayerOutput(x, ClusteredState(window, *past))
