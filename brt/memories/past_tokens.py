"""Layers with a window and a memory of the last M tokens before the block of a token.

The base class `PastTokensLayer` stores the keys and values of past tokens; each subclass defines
how tokens read them. With rotary positions, a token reads all tokens of the memory as if each were
the nearest token beyond its window. The weights of attention then depend on the content of these
tokens and not on their distance. The letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from brt.config import Model
from brt.config.checks import check
from brt.distributed.rules import constrain
from brt.layers.attention import Mix, TransformerBlock
from brt.layers.basic import parameter
from brt.layers.cache import closed_window, document_places, speeds_of, with_cache
from brt.layers.state import (
    Given,
    LayerOutput,
    LocalState,
    WindowState,
    state_array,
    window_state,
)
from brt.layers.window import WindowLayer
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import spread_over_devices
from brt.ops.partial_attention import AttentionPart
from brt.ops.positions import rotate, rotations


def check_reach(name: str, layers: Sequence[int], model: Model) -> None:
    """Raises ConfigError if the window of one of `layers`, which the setting `name` lists, is
    smaller than a block.

    The tokens of a block enter the memory together, at the end of the block. In a smaller window, a
    token would see some earlier tokens of its block neither in the window nor in the memory.
    """
    for layer in layers:
        window = model.windows[layer]
        check(
            window >= model.block_length,
            f"layer {layer} of {name}: its window of {window} tokens must not be below the block "
            f"of {model.block_length} tokens; set Window.block = {window}",
        )


def counts_before(
    length: Int[Array, " B"],
    document_start: Bool[Array, "B N"],
    *,
    added: int,
    size: int,
    delay: int = 0,
) -> Int[Array, "B N+1"]:
    """Returns how many entries of the memory each block, and the block after the segment, can read.

    Before each block, the memory has the last `size` entries that blocks have added to it. A block
    can read those entries that belong to its own document.

    Args:
      length: the number of entries of the memory, before the segment, that belong to the document
        that a row is reading.
      added: the number of entries that a block adds.
      delay: the number of blocks after which the entries of a block enter the memory.
    """
    blocks = jnp.arange(document_start.shape[1] + 1)[None]
    starts = jnp.pad(document_start, ((0, 0), (0, 1)))
    last = jax.lax.cummax(jnp.where(starts, blocks, -1), axis=1)
    since = jnp.maximum(blocks - last - delay, 0) * added
    return jnp.minimum(jnp.where(last < 0, length[:, None] + blocks * added, since), size)


def last_entries(x: Array, size: int, length: Int[Array, " B"], axis: int = 1) -> Array:
    """Returns the last `size` entries of x [B, ...] along `axis`. In every row, the last `length`
    entries are kept, and the entries before them become zeros.
    """
    kept = jnp.arange(size)[None] >= size - length[:, None]
    shape = [1] * x.ndim
    shape[0], shape[axis] = kept.shape
    last = jax.lax.slice_in_dim(x, x.shape[axis] - size, x.shape[axis], axis=axis)
    return jnp.where(kept.reshape(shape), last, 0)


def attend_by_block(
    attend: Callable[[Int[Array, ""], Array, list[Array], Dropout | None], PyTree[Array]],
    queries: Float[Array, "B T H K"],
    past: Sequence[Array],
    blocks: int,
    *,
    size: int,
    axis: int,
    dropout: Dropout | None,
) -> PyTree[Array]:
    """Calls `attend` for each of N = `blocks` blocks, and returns the joined results [B, T, ...].

    The backward pass recomputes the attention weights, because storing the weights of all blocks
    would take too much device memory.

    Args:
      attend: gets the index of a block, the queries of the block, the entries of each array of
        `past` that the block reads, and the dropout of the block. It returns arrays
        [B, T / N, ...].
      past: the arrays that the blocks read. A block of T / N tokens reads `size` consecutive
        entries on `axis`. The index of the first of these entries is the index of the block's first
        token.
    """
    width = queries.shape[1] // blocks

    @jax.checkpoint
    def attend_in_block(n: Int[Array, ""], past: Sequence[Array], queries: Array) -> PyTree[Array]:
        first = n * width
        own = jax.lax.dynamic_slice_in_dim(queries, first, width, axis=1)
        seen = [jax.lax.dynamic_slice_in_dim(part, first, size, axis=axis) for part in past]
        drop = dropout and Dropout(jax.random.fold_in(dropout.rng, n), dropout.rate)
        return attend(n, own, seen, drop)

    parts = jax.lax.map(lambda n: attend_in_block(n, past, queries), jnp.arange(blocks))
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(*queries.shape[:2], *x.shape[3:]), parts
    )


class MemoryState(NamedTuple):
    """The cache, and a memory of the keys and values of the last M tokens, oldest token first.
    Heads come before tokens because a search is separate for each head.
    """

    window: WindowState | LocalState
    keys: Float[Array, "B G M K"]
    values: Float[Array, "B G M K"]
    # The number of tokens of the memory, which all belong to the current document. They are the
    # last entries; the entries before them are zeros.
    length: Int[Array, " B"]


def memory_state(model: Model, size: int) -> MemoryState:
    """Describes the state of a layer with a memory of `size` tokens."""
    shape = (model.key_heads, size, model.head_dim)
    keys = state_array(shape, ("kv_heads", None, None))
    return MemoryState(window_state(model), keys, keys, state_array((), (), "int32"))


class MemoryAndSegment(NamedTuple):
    """Keys and values of Z = M + T tokens: M tokens of the memory, then T tokens of a segment."""

    keys: Float[Array, "B G Z K"]
    values: Float[Array, "B G Z K"]


def memory_and_segment(
    state: MemoryState, keys: Float[Array, "B T G K"], values: Float[Array, "B T G K"]
) -> MemoryAndSegment:
    pairs = (state.keys, keys), (state.values, values)
    whole = ((old, constrain(new, "lanes", None, "kv_heads", None)) for old, new in pairs)
    return MemoryAndSegment(
        *(jnp.concatenate([old, new.swapaxes(1, 2)], axis=2) for old, new in whole)
    )


def state_after_segment(
    past: MemoryAndSegment, length: Int[Array, " B"], window: WindowState | LocalState, *, size: int
) -> MemoryState:
    """Returns the state with the cache `window`, and with the last `size` tokens of `past` as the
    memory. The last `length` of these tokens belong to the current document.
    """
    keys, values = (last_entries(part, size, length, axis=2) for part in past)
    return MemoryState(window, keys, values, length)


class Readers(NamedTuple):
    """The tokens that read the memory (Q tokens in each of N blocks), and what they may read."""

    # The number of tokens of the memory that each block may read: the last tokens before the block.
    counts: Int[Array, "B N"]
    # The positions of the reading tokens within their block. For a segment, these are all positions
    # of a block, which are the same in all rows (R = 1). While tokens are read one by one, each row
    # has the position of its single token (R = B, Q = 1).
    places: Int[Array, "R Q"]


class PastTokensLayer(WindowLayer):
    """Base class of layers whose tokens attend to their window and to a memory of past tokens.

    A subclass defines `mix`, and may override `window_positions`. The parameter `memory_gate` has a
    number for each head, initially zero, from which `mix` computes how much the head takes from the
    memory.
    """

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
          queries: the scaled queries of the tokens of N blocks. The keys of the memory are not
            rotated. With rotary positions, the queries are therefore rotated as if each key were
            the nearest key beyond the window.
          window: the result of attention to the window and to sinks, if the layer has any.
          past: the memory before the first block, followed by the tokens of the blocks. Block n of
            T / N tokens sees the M tokens that begin at index n T / N. With one block, `past` may
            have the memory alone.
        """
        raise NotImplementedError

    def setup(self) -> None:
        m = self.model
        windowed = dataclasses.replace(m, positions=self.window_positions())
        self.tokens = TransformerBlock(windowed, m.feedback, self.training, self.kernels)
        self.memory_gate = parameter(
            self, "memory_gate", (m.heads,), ("heads",), nn.initializers.zeros
        )

    def _mix(
        self, past: MemoryAndSegment, counts: Int[Array, "B N"], before: Int[Array, "B N"] | None,
        places: Int[Array, "R Q"],
    ) -> Mix:  # fmt: skip
        # Tokens always read the sinks together with their window, so they do not read the sinks a
        # second time from the memory. `before` has the number of tokens of the document before each
        # block.
        if self.model.sliding.sinks:
            # Layers with sinks count the tokens of the document in their state, so the number of
            # tokens before each block is known.
            assert before is not None
            counts = jnp.clip(before - self.model.sliding.sinks, 0, counts)
        names = ("lanes", "heads", None, None)
        shared = MemoryAndSegment(
            *(spread_over_devices(part, self.model.heads, names) for part in past)
        )

        def attend_beyond_window(queries: Array, window: AttentionPart) -> Array:
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

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Lets each block read the M tokens before it; the last M tokens are the next memory."""
        m, size = self.model, given.state.keys.shape[2]
        projections = self.tokens.project(x)
        cached, window = with_cache(m, given, projections)
        past = memory_and_segment(
            given.state, self.tokens.normalized_keys(projections.keys), projections.values
        )
        counts = counts_before(
            given.state.length, given.document_start, added=m.block_length, size=size
        )
        before = None
        if cached.first is not None:
            before = document_places(cached, x.shape[1])[:, :: m.block_length]
        mix = self._mix(past, counts[:, :-1], before, jnp.arange(m.block_length)[None])
        y = self.tokens.attend(projections, cached, given.feedback, mix)
        return LayerOutput(y, state_after_segment(past, counts[:, -1], window, size=size))

    def mix_step(self, given: Given) -> Mix:
        state, window = given.state, given.state.window
        before = window.length[:, None] if isinstance(window, LocalState) else None
        past = MemoryAndSegment(state.keys, state.values)
        return self._mix(past, state.length[:, None], before, given.position[:, None])

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Makes the open block the cache, and adds its tokens to the memory."""
        m, size = self.model, given.state.keys.shape[2]
        window = closed_window(m, given)
        keys, values = (part[:, -m.block_length :] for part in (window.keys, window.values))
        past = memory_and_segment(given.state, self.tokens.normalized_keys(keys), values)
        length = jnp.minimum(given.state.length + m.block_length, size)
        return LayerOutput(x, state_after_segment(past, length, window, size=size))
