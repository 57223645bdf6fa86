"""The memorizing layer: sliding-window attention, and attention to a few tokens of a memory of past
tokens, which a search selects for each query. The letters of shapes are those of
`brt.layers.state`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.config import Model
from brt.layers.flops import window_flops
from brt.memories.memorizing.memory_attention import memory_attention
from brt.memories.memorizing.section import Memorizing
from brt.memories.memory_state import MemoryAndSegment, MemoryState, empty_memory
from brt.memories.past_tokens import PastTokensLayer, Readers
from brt.ops.partial_attention import AttentionPart


def new_memory_state(model: Model, batch: int, dtype: jnp.dtype) -> MemoryState:
    return empty_memory(model, model.of(Memorizing).size, batch, dtype)


def memory_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, of the search in the memory, and of
    attention to the keys that the search returns.
    """
    section = model.of(Memorizing)
    width = model.heads * model.head_dim
    searching = 2 * width * section.size + 4 * width * section.neighbors
    return window_flops(model) + searching


class MemorizingLayer(PastTokensLayer):
    """A layer of the Memorizing Transformer.

    A token attends to its window and, separately, to the results of a search in the memory of the
    tokens before its block (Memorizing Transformers, section 3). A learned gate of each head mixes
    the two outputs. With `Memorizing.gate` = "sigmoid", the layer has no positions, as in the
    original recipe. With "tanh", the window has the model's positions.
    """

    def memory_size(self) -> int:
        return self.model.of(Memorizing).size

    def window_positions(self) -> str:
        return self.model.positions if self.model.of(Memorizing).gate == "tanh" else "none"

    def mix(
        self,
        queries: Float[Array, "B T H K"],
        window: AttentionPart,
        past: MemoryAndSegment,
        readers: Readers,
    ) -> Float[Array, "B T H K"]:
        section, local, counts = self.model.of(Memorizing), window.output, readers.counts
        null_keys = not self.model.sliding.mask_empty_cache
        remembered_output = memory_attention(
            queries, *past, counts, size=section.size, neighbors=section.neighbors,
            search=section.search, null_keys=null_keys,
            implementation=self.kernels.memory_attention,
        )  # fmt: skip
        # A block that can read no token of the memory has a closed gate, unless missing keys count
        # as keys of zeros (`null_keys`).
        open_gate = (counts > 0) | null_keys
        bounded = jnp.tanh if section.gate == "tanh" else jax.nn.sigmoid
        gate = jnp.where(open_gate[:, :, None], bounded(self.memory_gate)[None, None], 0)
        gate = jnp.repeat(gate, local.shape[1] // counts.shape[1], axis=1)
        gate = gate.astype(local.dtype)[..., None]
        return local * (1 - gate) + remembered_output * gate
