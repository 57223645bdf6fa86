"""Layers whose tokens attend to all tokens of a memory of past tokens.

There are two kinds. In "dense_memory" layers, the baseline of MELODI (arXiv 2410.03156), a token
attends with one softmax to the memory and to its block. "gated_dense_memory" layers are
sliding-window layers that read the memory through a gate.
"""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.config.checks import check, check_positive
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import compute_dtype
from brt.layers.flops import window_flops
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.state import LayerOutput
from brt.memories.past_tokens import (
    MemoryAndSegment,
    MemoryState,
    PastTokensLayer,
    Readers,
    check_reach,
    empty_memory,
    memory_axes,
    tokens_before,
)
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import spread_over_devices
from brt.ops.masked_attention import attend_part
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.recurrent_attention import StateKV

# Settings of dense-memory layers.


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMemory(KindSection):
    """Settings of layers whose tokens attend to every token of a memory of past tokens, in addition
    to their own block or (with a gate) to their window.
    """

    kind: ClassVar[str] = "dense_memory"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    # "none": a token attends with one softmax to its block and to the memory, without positions, as
    # in MELODI's code. "tanh": the layer is a sliding-window layer with the model's positions and
    # sinks, and a gate for each head adds what the head reads from the memory. The gate is closed
    # in a new model, which therefore computes the same as the model without a memory.
    gate: Literal["none", "tanh"] = adaptable("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "size")

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        gated = self.gate == "tanh"
        return {
            "dense_memory": () if gated else self.layers,
            "gated_dense_memory": self.layers if gated else (),
        }

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the model's settings do not fit the dense-memory layers.

        Layers without a gate attend to a block and a memory alone. Their window must be as long as
        a block, and the model must have no sinks and no feedback from recurrent states. Layers with
        a gate need a cache whose empty places are masked, a window that is not smaller than a
        block, and a memory of more tokens than the window.
        """
        if not self.layers:
            return
        if self.gate == "tanh":
            check_reach("DenseMemory.layers", self.layers, model)
            widest = max(model.windows[layer] for layer in self.layers)
            check(
                self.size > widest,
                f"DenseMemory.size = {self.size} must be above the window of {widest} tokens where "
                "DenseMemory.gate = 'tanh', because the memory is read beyond the window",
            )
            check(
                model.sliding.cache and model.sliding.mask_empty_cache,
                "DenseMemory.gate = 'tanh' needs Window.cache = True and Window.mask_empty_cache = "
                "True",
            )
            return
        check(
            not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"DenseMemory.layers = {self.layers} cannot; set it to False",
        )
        check(
            not model.sliding.sinks,
            f"Window.sinks = {model.sliding.sinks} needs DenseMemory.gate = 'tanh' for "
            f"DenseMemory.layers = {self.layers}; set the gate, or no sinks",
        )
        for layer in self.layers:
            window = model.windows[layer]
            check(
                window == model.block_length,
                f"layer {layer} of DenseMemory.layers reads its block of {model.block_length} "
                f"tokens instead of a window of {window}; set DenseMemory.gate = 'tanh' or "
                "Window.block = 0",
            )


# The dense-memory layer: attention, with one softmax, to a block and to the last M tokens before
# it.
#
# The authors of MELODI (arXiv 2410.03156) compare their model with models of this layer, which they
# call Memorizing Transformer. Unlike in the original Memorizing Transformer, a token attends to all
# tokens of the memory instead of the results of a search, and there is no gate between memory and
# block. The letters of shapes are those of `brt.layers.state`.


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


# The gated dense-memory layer: a sliding-window layer whose tokens also attend to all tokens of a
# memory that have left their window. The memory has the last M tokens before the block of a token.
# The letters of shapes are those of `brt.layers.state`.


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


register_kind(
    "dense_memory",
    LayerKind(
        DenseMemoryLayer,
        new_dense_state,
        lambda model: DENSE_AXES,
        {"memory": ("keys", "values", "length")},
        dense_memory_flops,
        DenseMemory,
    ),
)
register_kind(
    "gated_dense_memory",
    LayerKind(
        GatedMemoryLayer,
        new_gated_state,
        memory_axes,
        {"cache": ("window",), "memory": ("keys", "values", "length")},
        gated_flops,
        DenseMemory,
    ),
)
