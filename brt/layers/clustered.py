"""The clustered layer: sliding-window attention, and attention to all of the past by clusters."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.layers.attention import Mix, TokenLayer, cache_is_readable, with_cache
from brt.layers.basic import parameter
from brt.layers.state import ClusteredState, OpenBlock, WindowState
from brt.ops.causal_clustered_attention import (
    Centroids,
    causal_clustered_attention,
    causal_clustered_attention_step,
    past_after,
    past_scan,
)
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import StateMemory


class ClusteredLayer(nn.Module):
    """A layer of causal clustered attention: (x, state) -> (y, state).

    As a sliding-window layer, but keys that leave the window stay readable: those of the block
    before exactly, older ones as far as the centroids of their heads have kept them. To the
    learned positions all of them are as far as the window's farthest key.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        m = self.model
        self.tokens = TokenLayer(
            m, cross_attends=m.feedback, training=self.training, kernels=self.kernels
        )
        # As queries begin: unit vectors, or of unit variance; their scale is shared.
        spread = m.head_dim**-0.5 if m.normalize_qk else 1.0
        self.centroids = parameter(
            self, "centroids", (m.heads, m.clusters, m.head_dim), ("heads", "clusters", None),
            nn.initializers.normal(spread),
        )  # fmt: skip
        if m.cluster_jensen:
            self.deviations = parameter(
                self, "deviations", (m.heads, m.clusters), ("heads", "clusters"),
                nn.initializers.constant(spread),
            )  # fmt: skip

    def _centroids(self) -> Centroids:
        m, scale = self.model, self.tokens.query_scale()[:, None]
        deviations = self.deviations if m.cluster_jensen else jnp.zeros((m.heads, m.clusters))
        return Centroids(self.centroids * scale[..., None], (deviations * scale) ** 2)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        state: ClusteredState,
        document_start: Bool[Array, "B N"],
        feedback: StateMemory | None = None,
    ) -> tuple[Float[Array, "B T D"], ClusteredState]:
        """A segment, in two phases: the pasts of all blocks, then the tokens of all blocks."""
        m, centroids = self.model, self._centroids()
        projections = self.tokens.project(x)
        keys, values, readable, window = with_cache(m, state.window, projections, document_start)
        implementation = self.kernels.causal_clustered_attention
        past, pasts = past_scan(
            keys, values, readable, state.past, centroids, implementation=implementation
        )

        def mix(queries: Float[Array, "B T H K"], part: AttentionPart) -> Float[Array, "B T H K"]:
            return causal_clustered_attention(
                queries, part, keys, values, readable, pasts, centroids, self.tokens.far_bias(),
                attend_to_self=m.attend_to_self, implementation=implementation,
            )  # fmt: skip

        y = self.tokens.attend(x, projections, keys, values, readable, feedback, mix)
        return y, ClusteredState(window, *past)

    def open(self, x: None, state: ClusteredState, *_: None) -> tuple[None, OpenBlock]:
        """An empty block behind `state`."""
        return x, OpenBlock(state.window.keys, state.window.values, None)

    def step(
        self,
        x: Float[Array, "B 1 D"],
        carried: tuple[ClusteredState, OpenBlock],
        position: Int[Array, ""],
        feedback: StateMemory | None = None,
    ) -> tuple[Float[Array, "B 1 D"], OpenBlock]:
        """One token of the open block; the past stands still."""
        state, block = carried
        mix = self._mix_step(state, position)
        return self.tokens.attend_step(x, state.window, block, position, feedback, mix)

    def _mix_step(self, state: ClusteredState, position: Int[Array, ""]) -> Mix:
        m, window = self.model, state.window

        def mix(queries: Float[Array, "B 1 H K"], part: AttentionPart) -> Float[Array, "B 1 H K"]:
            return causal_clustered_attention_step(
                queries, part, window.keys, window.values, cache_is_readable(m, window), position,
                state.past, self._centroids(), self.tokens.far_bias(),
                attend_to_self=m.attend_to_self,
            )  # fmt: skip

        return mix

    def close(
        self, x: None, carried: tuple[ClusteredState, OpenBlock], *_: None
    ) -> tuple[None, ClusteredState]:
        """The state after a full block: the past takes in the block before it."""
        state, block = carried
        before = (z.swapaxes(1, 2) for z in (state.window.keys, state.window.values))
        readable = cache_is_readable(self.model, state.window)
        past = past_after(state.past, *before, readable, self._centroids())
        window = WindowState(block.keys, block.values, jnp.ones_like(state.window.valid))
        return x, ClusteredState(window, *past)
