"""The dense-memory layer: attention, with one softmax, to a block and to the last M tokens before
it.

The authors of MELODI (arXiv 2410.03156) compare their model with models of this layer, which they
call Memorizing Transformer. Unlike in the original Memorizing Transformer, a token attends to all
tokens of the memory instead of the results of a search, and there is no gate between memory and
block. The letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import compute_dtype
from brt.layers.flops import window_flops
from brt.layers.state import LayerOutput
from brt.memories.dense_memory.section import DenseMemory
from brt.memories.history import tokens_before
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import spread_over_devices
from brt.ops.masked_attention import attend_part
from brt.ops.recurrent_attention import StateKV


class DenseState(NamedTuple):
    """The keys and values of the last M tokens, oldest first; places without a token, at the
    beginning, are zeros. The layer has no other cache.
    """

    keys: Float[Array, "B M G K"]
    values: Float[Array, "B M G K"]
    length: Int[Array, " B"]  # The number of tokens, which all belong to the current document.


_VECTORS = ("lanes", None, "kv_heads", None)
_BY_QUERY_HEAD = ("lanes", None, "heads", None)
DENSE_AXES: Any = DenseState(_VECTORS, _VECTORS, ("lanes",))


def new_dense_state(model: Model, batch: int, dtype: jnp.dtype) -> DenseState:
    section = model.of(DenseMemory)
    keys = jnp.zeros((batch, section.size, model.key_heads, model.head_dim), dtype)
    return DenseState(keys, jnp.zeros_like(keys), jnp.zeros((batch,), jnp.int32))


def dense_memory_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, in which attention to the window is
    replaced by attention to the memory and to the tokens of the block up to the token itself.
    """
    section = model.of(DenseMemory)
    m = model
    # `own` is the number of keys of its own block that a token sees, on average over the block.
    own = (m.window + 1) // 2 if m.sliding.attend_to_self else (m.window - 1) // 2
    return window_flops(m) + 4 * m.heads * m.head_dim * (section.size + own - m.window)


class DenseMemoryLayer(nn.Module):
    """A layer whose tokens attend to their own block and to a memory of the last M tokens before
    the block. The layer has no position biases.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.tokens = TransformerBlock(
            dataclasses.replace(self.model, positions="none"), training=self.training,
            kernels=self.kernels,
        )  # fmt: skip

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: DenseState,
        document_start: Bool[Array, "B N"],
        **_: Any,
    ) -> LayerOutput:
        """Attends block by block, because a block has many attention weights."""
        section = self.model.of(DenseMemory)
        m, blocks = self.model, document_start.shape[1]
        queries, own = self._projected(x)
        pairs = (state.keys, own.keys), (state.values, own.values)
        keys, values = (
            jnp.concatenate([old, constrain(new, *_VECTORS)], axis=1) for old, new in pairs
        )
        start = constrain(document_start, "lanes", None)
        lengths = tokens_before(state.length, start, window=m.window, size=section.size)
        queries = constrain(queries, *_BY_QUERY_HEAD)
        drawn = self.make_rng("dropout") if m.dropout and self.training else None

        # A block has W (M + W) attention weights for each head. The backward pass recomputes the
        # weights, because storing them would take too much memory of the device.
        @jax.checkpoint
        def attend_in_block(n: Int[Array, ""], keys: Array, values: Array, queries: Array) -> Array:
            first = n * m.window
            own = jax.lax.dynamic_slice_in_dim(queries, first, m.window, axis=1)
            seen = StateKV(
                *(
                    jax.lax.dynamic_slice_in_dim(z, first, section.size + m.window, axis=1)
                    for z in (keys, values)
                )
            )
            dropout = None
            if drawn is not None:
                dropout = Dropout(jax.random.fold_in(drawn, n), m.dropout)
            length = jnp.take(lengths, n, axis=1)
            return self._read(own, seen, length, jnp.arange(m.window), dropout)

        read = jax.lax.map(lambda n: attend_in_block(n, keys, values, queries), jnp.arange(blocks))
        read = jnp.moveaxis(read, 0, 1).reshape(queries.shape)
        y = self.tokens.finish(x, [read])
        return LayerOutput(y, self._after(keys, values, lengths[:, -1]))

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], StateKV]:
        projections = self.tokens.project(x)
        keys = self.tokens.normalized_keys(projections.keys)
        return self.tokens.scaled_queries(projections.queries), StateKV(keys, projections.values)

    def _read(
        self,
        queries: Float[Array, "B Q H K"],
        seen: StateKV,
        length: Int[Array, " B"],
        places: Int[Array, " Q"],
        dropout: Dropout | None = None,
    ) -> Float[Array, "B Q H K"]:
        # Attends from the tokens at `places` of a block; `seen` holds the memory and then the
        # block.
        section = self.model.of(DenseMemory)
        m = self.model
        columns = jnp.arange(seen.keys.shape[1])[None]
        there = (columns >= section.size) | (columns >= section.size - length[:, None])
        # If `Window.mask_empty_cache` is False, places of the memory without a token are attended
        # to as keys and values of zeros.
        if not m.sliding.mask_empty_cache:
            kept = there[:, :, None, None]
            seen = StateKV(*(jnp.where(kept, z, 0) for z in seen))
            there = jnp.ones_like(there)
        last = places + section.size - (0 if m.sliding.attend_to_self else 1)
        mask = there[:, None] & (columns <= last[:, None])[None]
        keys, values = (spread_over_devices(z, m.heads, _BY_QUERY_HEAD) for z in seen)
        part = attend_part(
            queries, keys, values, mask, dropout, implementation=self.kernels.masked_attention
        )
        return part.output

    def _after(
        self, keys: Float[Array, "B Z G K"], values: Float[Array, "B Z G K"],
        length: Int[Array, " B"],
    ) -> DenseState:  # fmt: skip
        section = self.model.of(DenseMemory)
        size = section.size
        kept = (jnp.arange(size)[None] >= size - length[:, None])[:, :, None, None]
        keys, values = (jnp.where(kept, z[:, -size:], 0) for z in (keys, values))
        return DenseState(keys, values, length)

    def begin_block(self, x: None, *, state: DenseState, **_: Any) -> LayerOutput:
        m = self.model
        shape = (len(state.length), m.window, m.key_heads, m.head_dim)
        zeros = jnp.zeros(shape, compute_dtype(m))
        return LayerOutput(x, StateKV(zeros, zeros))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: DenseState,
        block: StateKV,
        position: Int[Array, ""],
        **_: Any,
    ) -> LayerOutput:
        """The key and the value of the token enter the open block; the memory does not change."""
        queries, own = self._projected(x)
        block = StateKV(
            *(
                jax.lax.dynamic_update_slice_in_dim(z, new, position, axis=1)
                for z, new in zip(block, own, strict=True)
            )
        )
        seen = StateKV(
            *(jnp.concatenate(pair, axis=1) for pair in zip(state[:2], block, strict=True))
        )
        read = self._read(queries, seen, state.length, position[None])
        return LayerOutput(self.tokens.finish(x, [read]), block)

    def end_block(self, x: None, *, state: DenseState, block: StateKV, **_: Any) -> LayerOutput:
        section, m = self.model.of(DenseMemory), self.model
        keys, values = (
            jnp.concatenate(pair, axis=1) for pair in zip(state[:2], block, strict=True)
        )
        length = jnp.minimum(state.length + m.window, section.size)
        return LayerOutput(x, self._after(keys, values, length))
