"""The memorizing layer: sliding-window attention, and attention to a memory of past tokens.

In shapes, B is the number of rows of the batch, T of tokens of a segment, N of its blocks, D of
numbers of a token's vector, H of heads, K of numbers of a head, and M of tokens of the memory.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.attention import Mix, TransformerBlock
from brt.layers.basic import parameter
from brt.layers.cache import closed_window, with_cache
from brt.layers.flops import window_flops
from brt.layers.state import (
    WINDOW_AXES,
    LayerOutput,
    OpenBlock,
    WindowState,
    new_window_state,
    open_block,
)
from brt.memories.history import tokens_before
from brt.memories.memorizing.memory_attention import memory_attention
from brt.memories.memorizing.section import Memorizing
from brt.ops.partial_attention import AttentionPart
from brt.ops.recurrent_attention import StateKV


class MemoryState(NamedTuple):
    """The cache, and a memory of keys and values of the last M tokens by head, oldest first.

    Attributes:
      window: the keys and values of the last block, as in a sliding-window layer.
      keys: [B, H, M, K], the keys of the memory's tokens. Heads come before tokens because the
        search is separate for each head.
      values: [B, H, M, K], the values of the memory's tokens.
      length: int32 [B], the number of tokens in the memory that belong to the current document.
    """

    window: WindowState
    keys: Float[Array, "B H M K"]
    values: Float[Array, "B H M K"]
    length: Int[Array, " B"]


MEMORY_AXES: Any = MemoryState(
    WINDOW_AXES, ("lanes", "heads", None, None), ("lanes", "heads", None, None), ("lanes",)
)


def new_memory_state(model: Model, batch: int, dtype: jnp.dtype) -> MemoryState:
    """Returns the state of a memorizing layer before the first token.

    Args:
      model: the settings of the model, as the layer sees them.
      batch: the number of rows of the batch.
      dtype: the dtype of cached keys and values.
    """
    section = model.of(Memorizing)
    shape = (batch, model.heads, section.size, model.head_dim)
    keys, values = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    window = new_window_state(model, batch, dtype)
    return MemoryState(window, keys, values, jnp.zeros((batch,), jnp.int32))


def memory_flops(model: Model) -> int:
    """Returns the FLOPs per token of a memorizing layer.

    They are the FLOPs of a sliding-window layer, of the search in the memory, and of attention to
    the keys that the search returns.
    """
    section = model.of(Memorizing)
    width = model.heads * model.head_dim
    searching = 2 * width * section.size + 4 * width * section.neighbors
    return window_flops(model) + searching


class Past(NamedTuple):
    """Keys and values of the M tokens of the memory and then of the T tokens of a segment; Z = M +
    T.
    """

    keys: Float[Array, "B H Z K"]
    values: Float[Array, "B H Z K"]


def extended(
    state: MemoryState, keys: Float[Array, "B T H K"], values: Float[Array, "B T H K"]
) -> Past:
    """Returns the keys and values of the memory, followed by those of a segment.

    Args:
      state: the state before the segment.
      keys, values: the keys and values of the T tokens of the segment.
    """
    pairs = (state.keys, keys), (state.values, values)
    whole = ((old, constrain(new, "lanes", None, "heads", None)) for old, new in pairs)
    return Past(*(jnp.concatenate([old, new.swapaxes(1, 2)], axis=2) for old, new in whole))


def remembered(
    past: Past, length: Int[Array, " B"], window: WindowState, *, size: int
) -> MemoryState:
    """Returns the layer's state after a segment.

    Args:
      past: the memory and the tokens of the segment, from `extended`.
      length: the number of the newest tokens of `past` that belong to the current document, at most
        `size`. Places of the memory for other tokens become zeros.
      window: the cache after the segment.
      size: M, the number of tokens of the memory.
    """
    kept = jnp.arange(size)[None] >= size - length[:, None]
    keys, values = (jnp.where(kept[:, None, :, None], part[:, :, -size:], 0) for part in past)
    return MemoryState(window, keys, values, length)


class MemorizingLayer(nn.Module):
    """A Memorizing Transformer layer.

    A token attends to its window, and to the results of a search in the memory of the tokens before
    its block (Memorizing Transformers, section 3). A learned gate per head mixes the two. As in the
    original's recipe, the layer has no position biases.

    Attributes:
      model: the settings of the model, as the layer sees them.
      training: True applies dropout.
      kernels: the settings that select the implementations of ops.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        """Creates the block of attention and MLP, without position biases, and the gate of each
        head.
        """
        m = self.model
        self.tokens = TransformerBlock(
            dataclasses.replace(m, positions="none"), cross_attends=m.feedback,
            training=self.training, kernels=self.kernels,
        )  # fmt: skip
        self.memory_gate = parameter(
            self, "memory_gate", (m.heads,), ("heads",), nn.initializers.zeros
        )

    def _mix(self, past: Past, counts: Int[Array, "B N"]) -> Mix:
        """Mixes the attention of N blocks to their window with attention to the results of the
        search.
        """
        section = self.model.of(Memorizing)
        m = self.model
        null_keys = not m.mask_empty_cache

        def attend_beyond_window(
            queries: Float[Array, "B T H K"], window: AttentionPart
        ) -> Float[Array, "B T H K"]:
            """Returns a mixture, by the gate of each head, of attention to the window and attention
            to the memory.

            Args:
              queries: the queries of the tokens.
              window: the result of attention to the windows: output [B, T, H, K] and log-sum-exp
                [B, T, H].
            """
            local = window.output
            remembered_output = memory_attention(
                queries, *past, counts, size=section.size, neighbors=section.neighbors,
                search=section.search, null_keys=null_keys,
                implementation=self.kernels.memory_attention,
            )  # fmt: skip
            # The gate is closed for blocks whose memory is empty, unless missing keys count as zero
            # keys.
            open_gate = (counts > 0) | null_keys
            gate = jnp.where(open_gate[:, :, None], jax.nn.sigmoid(self.memory_gate)[None, None], 0)
            gate = jnp.repeat(gate, local.shape[1] // counts.shape[1], axis=1)
            gate = gate.astype(local.dtype)[..., None]
            return local * (1 - gate) + remembered_output * gate

        return attend_beyond_window

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
        section = self.model.of(Memorizing)
        m = self.model
        projections = self.tokens.project(x)
        cached, window = with_cache(m, state.window, projections, document_start)
        past = extended(state, self.tokens.unit_keys(projections.keys), projections.values)
        counts = tokens_before(state.length, document_start, window=m.window, size=section.size)
        mix = self._mix(past, counts[:, :-1])
        y = self.tokens.attend(x, projections, cached, feedback, mix)
        return LayerOutput(y, remembered(past, counts[:, -1], window, size=section.size))

    def begin_block(self, x: None, *, state: MemoryState, **_: Any) -> LayerOutput:
        """Returns an open block (the data of a block that is read token by token) without tokens.

        Args:
          x: None, which is returned as the output; a block begins without a token.
          state: the state after the previous block.

        Returns:
          The open block, as the state of the `LayerOutput`.
        """
        return LayerOutput(x, open_block(state.window))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: MemoryState,
        block: OpenBlock,
        position: Int[Array, ""],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Reads one token. Its key and value enter the open block, and the memory does not change.

        Args:
          x: the input vector of the token.
          state: the layer's state after the previous block.
          block: the open block, which has the keys and values of the block's earlier tokens.
          position: the position of the token in the block.
          feedback: the keys and values of recurrent states that the token also attends to, or None.

        Returns:
          The token's output vector; and the open block with the token added, as the state of the
          `LayerOutput`.
        """
        mix = self._mix(Past(state.keys, state.values), state.length[:, None])
        return LayerOutput(
            *self.tokens.attend_step(x, state.window, block, position, feedback, mix)
        )

    def end_block(self, x: None, *, state: MemoryState, block: OpenBlock, **_: Any) -> LayerOutput:
        """Returns the layer's state after a full block. The block becomes the cache, and its tokens
        also enter the memory.

        Args:
          x: None, which is returned as the output.
          state: the layer's state after the previous block.
          block: the open block, which has the keys and values of all tokens of the block.

        Returns:
          The new state, as the state of the `LayerOutput`.
        """
        section, m = self.model.of(Memorizing), self.model
        past = extended(state, self.tokens.unit_keys(block.keys), block.values)
        length = jnp.minimum(state.length + m.window, section.size)
        window = closed_window(self.model, state.window, block)
        return LayerOutput(x, remembered(past, length, window, size=section.size))
