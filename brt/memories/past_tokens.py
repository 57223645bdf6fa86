"""Layers with a window and a memory of the last M tokens before the block of a token.

`PastTokensLayer` is the base class of these layers. The base class stores the keys and values of
past tokens; each subclass defines how tokens read them. With rotary positions, a token reads all
tokens of the memory as if each were the nearest token beyond its window. The weights of attention
then depend on the content of these tokens and not on their distance.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, Q of
tokens of a block, D of numbers of a token's vector, H of heads of queries, G of heads of keys, K of
numbers of a head, and M of tokens of the memory.
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
    """The tokens that read the memory (Q tokens in each of N blocks), and how much they may read.

    Attributes:
      counts: int32 [B, N], the number of tokens of the memory that the tokens of each block may
        read. These are the last tokens before the block.
      places: int32 [Q], the positions within a block of the Q tokens that read. They are the same
        for all blocks: all positions of a block for a segment, or one position for a single token.
    """

    counts: Int[Array, "B N"]
    places: Int[Array, " Q"]


class PastTokensLayer(WindowLayer):
    """Base class of layers whose tokens attend to their window and to a memory of past tokens.

    A subclass defines `memory_size` and `mix`, and may override `window_positions`. The parameter
    `memory_gate` has a number for each head, initially zero, from which `mix` computes how much the
    head takes from the memory.

    Attributes:
      model: the settings of the model, with the window of this layer (`Model.for_layer`).
      training: True applies dropout.
      kernels: the settings that select the implementations of ops.
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

        Each subclass defines how attention to the window and attention to the memory are combined.

        Args:
          queries: the scaled queries of the tokens of N blocks. With rotary positions, they are
            rotated for products with the keys of the memory, which are not rotated.
          window: the result of attention to the window and to sinks (the first tokens of the
            document), if the layer has any: output [B, T, H, K] and log-sum-exp [B, T, H].
          past: the memory before the first block, followed by the tokens of the blocks. Block n of
            T / N tokens sees the M tokens that begin at index n T / N. With one block, `past` may
            have the memory alone.
          readers: the number of tokens of the memory that each block may read, and the positions of
            the T tokens in their blocks.
        """
        raise NotImplementedError

    def setup(self) -> None:
        """Creates the module of attention and MLP, and the gate of each head."""
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
        """Returns the function that adds attention to the memory to attention to the window.

        Tokens always read the sinks (the first tokens of the document) together with their window,
        so the sinks are not read from the memory, too.

        Args:
          past: the memory, followed by the tokens of the blocks that read the memory.
          counts: the number of tokens of the document in the memory before each block.
          before: the number of tokens of the document before each block; None in models without
            sinks.
          places: the positions of the reading tokens in their block.
        """
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
            """Returns the attention output of tokens that read their window and the memory.

            Args:
              queries: the scaled queries of the tokens, without rotary positions.
              window: the result of attention to the window and to sinks, if the layer has any:
                output [B, T, H, K] and log-sum-exp [B, T, H].
            """
            queries = self._behind_window(queries)
            return self.mix(queries, window, shared, Readers(counts, places))

        return attend_beyond_window

    def _behind_window(self, queries: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        """Returns the queries for products with keys of the memory, which are not rotated.

        With rotary positions, a query is rotated by the distance of the nearest key beyond the
        window. Queries that are not rotated would read the memory at the distance 0, at which a
        pretrained layer expects only the token itself.
        """
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
        """Reads a segment and returns the outputs of its tokens and the state after the segment.

        Args:
          x: the vectors of the tokens.
          state: the state before the segment.
          document_start: True where a document starts with block n.
          feedback: the keys and values of recurrent states that the tokens also attend to, or None.
            With feedback, the segment has a single block.
        """
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
        """Returns the function with which `decode_step` combines the attention of one token to its
        window with attention to the memory.

        Args:
          state: the layer's state after the previous block.
          position: the position of the token in its block.
        """
        window = state.window
        before = window.length[:, None] if isinstance(window, LocalState) else None
        past = MemoryAndSegment(state.keys, state.values)
        return self._mix(past, state.length[:, None], before, position[None])

    def end_block(self, x: None, *, state: MemoryState, block: OpenBlock, **_: Any) -> LayerOutput:
        """Returns the layer's state after a full block. The block becomes the cache, and its tokens
        also enter the memory.

        Args:
          x: None, which is returned as the output.
          state: the layer's state after the previous block.
          block: the open block, which has the keys and values of all tokens of the block.

        Returns:
          A `LayerOutput` whose `state` is the new state.
        """
        m, size = self.model, self.memory_size()
        window = closed_window(m, state.window, block)
        keys, values = (part[:, -m.block_length :] for part in (window.keys, window.values))
        past = memory_and_segment(state, self.tokens.normalized_keys(keys), values)
        length = jnp.minimum(state.length + m.block_length, size)
        return LayerOutput(x, state_after_segment(past, length, window, size=size))
