"""Layers that also attend to a few tokens of a long memory, which a search selects for each query
(Memorizing Transformers, arXiv 2203.08913).
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brt.config import Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.layers.flops import window_flops
from brt.layers.kinds import LayerKind, register_kind
from brt.memories.memory_attention import memory_attention
from brt.memories.past_tokens import (
    MemoryAndSegment,
    MemoryState,
    PastTokensLayer,
    Readers,
    check_reach,
    empty_memory,
    memory_axes,
)
from brt.ops.partial_attention import AttentionPart

# Settings of memorizing layers.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memorizing(KindSection):
    """Settings of layers that attend to the results of a search in a long memory."""

    kind: ClassVar[str] = "memorizing"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    neighbors: int = adaptable(128)  # A query reads this many tokens of the memory.
    # "exact" finds the tokens whose keys have the largest products with the query. "bucketed"
    # divides the memory into `neighbors` buckets and finds the best token of each bucket, as the
    # authors' code does.
    search: Literal["exact", "bucketed"] = adaptable("exact")
    # A gate for each head mixes attention to the memory and attention to the window. With the gate
    # of the paper, "sigmoid", the layer has no positions, and the gate is half open in a new model.
    # With "tanh", the window has the model's positions, and the gate is closed in a new model,
    # which therefore computes the same as the model without a memory.
    gate: Literal["sigmoid", "tanh"] = adaptable("sigmoid")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size", "neighbors")
        check(
            not self.layers or self.neighbors <= self.size,
            f"Memorizing.neighbors = {self.neighbors} must not be above "
            f"Memorizing.size = {self.size}",
        )
        check(
            not self.layers or self.search == "exact" or self.size % self.neighbors == 0,
            f"Memorizing.size = {self.size} must be a multiple of Memorizing.neighbors = "
            f"{self.neighbors} where Memorizing.search = 'bucketed'",
        )

    def check_model(self, model: Model) -> None:
        check_reach("Memorizing.layers", self.layers, model)

    def check_segment(self, name: str, length: int) -> None:
        """Raises ConfigError if a segment, of the length in setting `name`, exceeds the memory."""
        check(
            self.size >= length,
            f"Memorizing.size = {self.size} must not be below {name} = {length}",
        )


# The memorizing layer: sliding-window attention, and attention to a few tokens of a memory of past
# tokens, which a search selects for each query. The letters of shapes are those of
# `brt.layers.state`.


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


register_kind(
    "memorizing",
    LayerKind(
        MemorizingLayer,
        new_memory_state,
        memory_axes,
        {"cache": ("window",), "memory": ("keys", "values", "length")},
        memory_flops,
        Memorizing,
    ),
)
