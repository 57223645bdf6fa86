"""The gated dense-memory layer: a sliding-window layer whose tokens also attend to all tokens of a
memory that have left their window. The memory has the last M tokens before the block of a token.
The letters of shapes are those of `brt.layers.state`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.flops import window_flops
from brt.memories.dense_memory.section import DenseMemory
from brt.memories.memory_state import MemoryAndSegment, MemoryState, empty_memory
from brt.memories.past_tokens import PastTokensLayer, Readers
from brt.ops.dropout import Dropout
from brt.ops.masked_attention import attend_part
from brt.ops.partial_attention import AttentionPart, merge_parts


def new_gated_state(model: Model, batch: int, dtype: jnp.dtype) -> MemoryState:
    return empty_memory(model, model.of(DenseMemory).size, batch, dtype)


def gated_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer and of attention to the tokens of the
    memory that have left a token's window, on average over the tokens of a block.
    """
    m = model
    own = (m.block_length + 1) // 2 if m.sliding.attend_to_self else (m.block_length - 1) // 2
    beyond = max(m.of(DenseMemory).size + own - m.window, 0)
    return window_flops(m) + 4 * m.heads * m.head_dim * beyond


class GatedMemoryLayer(PastTokensLayer):
    """A sliding-window layer that reads a memory of past tokens through a gate.

    A head computes two attention outputs: `local` from the window alone, and `both` from the window
    and the memory with one softmax. The output of the head is local + tanh(gate) (both - local),
    with a learned number `gate` for each head. The gate is 0 in a new layer, which therefore
    computes the same as a sliding-window layer. Position biases treat all keys of the memory like
    the farthest key of the window.
    """

    def memory_size(self) -> int:
        return self.model.of(DenseMemory).size

    def mix(
        self,
        queries: Float[Array, "B T H K"],
        window: AttentionPart,
        past: MemoryAndSegment,
        readers: Readers,
    ) -> Float[Array, "B T H K"]:
        beyond = self._attend_to_memory(queries, past, readers)
        beyond = beyond._replace(lse=beyond.lse + self.tokens.far_bias()[None, None])
        both = merge_parts([window, beyond]).output
        gate = jnp.tanh(self.memory_gate)[None, None, :, None]
        local = window.output.astype(jnp.float32)
        return (local + gate * (both - local)).astype(window.output.dtype)

    def _attend_to_memory(
        self, queries: Float[Array, "B T H K"], past: MemoryAndSegment, readers: Readers
    ) -> AttentionPart:
        """Attends, block by block, to the keys of the memory that have left a token's window."""
        m, size = self.model, self.memory_size()
        drawn = self.make_rng("dropout") if m.dropout and self.training else None
        blocks, width = readers.counts.shape[1], len(readers.places)
        queries = constrain(queries, "lanes", None, "heads", None)
        columns = jnp.arange(size)
        farthest = m.window - 1 if m.sliding.attend_to_self else m.window
        left = (readers.places[:, None] + size - columns[None]) > farthest

        # A block has W M attention weights for each head. The backward pass recomputes the weights,
        # because storing them would take too much memory of the device.
        @jax.checkpoint
        def attend_in_block(
            n: Int[Array, ""], past: MemoryAndSegment, queries: Array
        ) -> AttentionPart:
            first = n * width
            own = jax.lax.dynamic_slice_in_dim(queries, first, width, axis=1)
            keys, values = (
                jax.lax.dynamic_slice_in_dim(part, first, size, axis=2).swapaxes(1, 2)
                for part in past
            )
            there = columns[None] >= size - jnp.take(readers.counts, n, axis=1)[:, None]
            dropout = None
            if drawn is not None:
                dropout = Dropout(jax.random.fold_in(drawn, n), m.dropout)
            return attend_part(
                own, keys, values, there[:, None] & left[None], dropout,
                implementation=self.kernels.masked_attention,
            )  # fmt: skip

        parts = jax.lax.map(lambda n: attend_in_block(n, past, queries), jnp.arange(blocks))
        return AttentionPart(
            *(jnp.moveaxis(x, 0, 1).reshape(*queries.shape[:2], *x.shape[3:]) for x in parts)
        )
