"""Layers with a window and a memory of the last M tokens before the block of a token.

The base class `PastTokensLayer` stores the keys and values of past tokens; each subclass defines
how tokens read them. With rotary positions, a token reads all tokens of the memory as if each were
the nearest token beyond its window. The weights of attention then depend on the content of these
tokens and not on their distance. The letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.layers.attention import Mix, TransformerBlock
from brt.layers.basic import parameter
from brt.layers.cache import closed_window, with_cache
from brt.layers.reading import document_places, speeds_of
from brt.layers.state import LayerOutput, LocalState, OpenBlock
from brt.layers.window import WindowLayer
from brt.memories.history import tokens_before
from brt.memories.memory_state import (
    MemoryAndSegment,
    MemoryState,
    memory_and_segment,
    state_after_segment,
)
from brt.ops.grouped_heads import spread_over_devices
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import rotate, rotations
from brt.ops.recurrent_attention import StateKV


class Readers(NamedTuple):
    """The tokens that read the memory (Q tokens in each of N blocks), and what they may read."""

    # The number of tokens of the memory that each block may read: the last tokens before the block.
    counts: Int[Array, "B N"]
    # The positions of the reading tokens within every block: all positions of a block for a
    # segment, or one position for a single token.
    places: Int[Array, " Q"]


class PastTokensLayer(WindowLayer):
    """Base class of layers whose tokens attend to their window and to a memory of past tokens.

    A subclass defines `memory_size` and `mix`, and may override `window_positions`. The parameter
    `memory_gate` has a number for each head, initially zero, from which `mix` computes how much the
    head takes from the memory.
    """

    def memory_size(self) -> int:
        """Returns M, the number of tokens of the memory."""
        raise NotImplementedError

    def window_positions(self) -> str:
        """Returns the kind of positions of tokens in their window, a value of `Model.positions`."""
        return self.model.positions

    def mix(
        self,
        queries: Float[Array, "B T H K"],
        window: AttentionPart,
        past: MemoryAndSegment,
        readers: Readers,
    ) -> Float[Array, "B T H K"]:
        """Returns the attention output of tokens that read their window and the memory.

        Args:
          queries: the scaled queries of the tokens of N blocks. With rotary positions, they are
            rotated for products with the keys of the memory, which are not rotated.
          window: the result of attention to the window and to sinks, if the layer has any.
          past: the memory before the first block, followed by the tokens of the blocks. Block n of
            T / N tokens sees the M tokens that begin at index n T / N. With one block, `past` may
            have the memory alone.
        """
        raise NotImplementedError

    def setup(self) -> None:
        m = self.model
        self.tokens = TransformerBlock(
            dataclasses.replace(m, positions=self.window_positions()), cross_attends=m.feedback,
            training=self.training, kernels=self.kernels,
        )  # fmt: skip
        self.memory_gate = parameter(
            self, "memory_gate", (m.heads,), ("heads",), nn.initializers.zeros
        )

    def _mix(
        self, past: MemoryAndSegment, counts: Int[Array, "B N"], before: Int[Array, "B N"] | None,
        places: Int[Array, " Q"],
    ) -> Mix:  # fmt: skip
        # Tokens always read the sinks together with their window, so the sinks are not read from
        # the memory, too. `before` has the number of tokens of the document before each block.
        if self.model.sliding.sinks:
            # Layers with sinks count the tokens of the document in their state, so the number of
            # tokens before each block is known.
            assert before is not None
            counts = jnp.clip(before - self.model.sliding.sinks, 0, counts)
        names = ("lanes", "heads", None, None)
        shared = MemoryAndSegment(
            *(spread_over_devices(part, self.model.heads, names) for part in past)
        )

        def attend_beyond_window(
            queries: Float[Array, "B T H K"], window: AttentionPart
        ) -> Float[Array, "B T H K"]:
            queries = self._behind_window(queries)
            return self.mix(queries, window, shared, Readers(counts, places))

        return attend_beyond_window

    def _behind_window(self, queries: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        # With rotary positions, a query is rotated by the distance of the nearest key beyond the
        # window. Queries that are not rotated would read the memory at the distance 0, at which a
        # pretrained layer expects only the token itself.
        m = self.model
        if self.window_positions() != "rotary":
            return queries
        distance = m.window if m.sliding.attend_to_self else m.window + 1
        return rotate(queries, rotations(distance, 1, speeds_of(m)))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: MemoryState,
        document_start: Bool[Array, "B N"],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Lets each block read the M tokens before it; the last M tokens are the next memory."""
        m, size = self.model, self.memory_size()
        projections = self.tokens.project(x)
        cached, window = with_cache(m, state.window, projections, document_start)
        past = memory_and_segment(
            state, self.tokens.normalized_keys(projections.keys), projections.values
        )
        counts = tokens_before(state.length, document_start, window=m.block_length, size=size)
        before = None
        if cached.first is not None:
            before = document_places(cached, x.shape[1])[:, :: m.block_length]
        mix = self._mix(past, counts[:, :-1], before, jnp.arange(m.block_length))
        y = self.tokens.attend(projections, cached, feedback, mix)
        return LayerOutput(y, state_after_segment(past, counts[:, -1], window, size=size))

    def mix_step(self, state: MemoryState, position: Int[Array, ""]) -> Mix:
        window = state.window
        before = window.length[:, None] if isinstance(window, LocalState) else None
        past = MemoryAndSegment(state.keys, state.values)
        return self._mix(past, state.length[:, None], before, position[None])

    def end_block(self, x: None, *, state: MemoryState, block: OpenBlock, **_: Any) -> LayerOutput:
        """Makes the block the cache; its tokens also enter the memory."""
        m, size = self.model, self.memory_size()
        window = closed_window(m, state.window, block)
        keys, values = (part[:, -m.block_length :] for part in (window.keys, window.values))
        past = memory_and_segment(state, self.tokens.normalized_keys(keys), values)
        length = jnp.minimum(state.length + m.block_length, size)
        return LayerOutput(x, state_after_segment(past, length, window, size=size))
