"""Layers whose tokens attend to all tokens of a memory of past tokens.

There are two kinds. In "dense_memory" layers, the baseline of MELODI (arXiv 2410.03156), a token
attends with one softmax to the memory and to its block. "gated_dense_memory" layers are
sliding-window layers that read the memory through a gate.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Kernels, Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import compute_dtype, token_dropout
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_feedback
from brt.layers.state import Given, LayerOutput, state_array, with_token
from brt.layers.window import keys_before, window_flops
from brt.memories.past_tokens import (
    MemoryAndSegment,
    PastTokensLayer,
    Readers,
    attend_by_block,
    check_reach,
    counts_before,
    last_entries,
    memory_state,
)
from brt.ops.dropout import Dropout
from brt.ops.grouped_heads import spread_over_devices
from brt.ops.masked_attention import attend_part
from brt.ops.partial_attention import AttentionPart, merge_parts
from brt.ops.recurrent_attention import StateKV


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseMemory(KindSection):
    """Settings of layers whose tokens attend to every token of a memory of past tokens, in addition
    to their own block or (with a gate) to their window.
    """

    kind: ClassVar[str] = "dense_memory"
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("size",)

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    size: int = adaptable(32768)  # The memory has this many tokens.
    # "none": a token attends with one softmax to its block and to the memory, without positions, as
    # in MELODI's code. "tanh": the layer is a sliding-window layer with the model's positions and
    # sinks, and a gate for each head adds what the head reads from the memory. The gate is closed
    # in a new model, which therefore computes the same as the model without a memory.
    gate: Literal["none", "tanh"] = adaptable("none")

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        gated = self.gate == "tanh"
        return {
            "dense_memory": () if gated else self.layers,
            "gated_dense_memory": self.layers if gated else (),
        }

    def check_model(self, model: Model) -> None:
        """Raises ConfigError if the model's settings do not fit the dense-memory layers.

        Layers without a gate attend only to their block and memory. Their window must be as long as
        a block, and the model must have no sinks and no feedback from recurrent states. Layers with
        a gate need a cache whose empty places are masked, a window that is not smaller than a
        block, and a memory of more tokens than the window.
        """
        name, layers = "DenseMemory.layers", self.layers
        if not layers:
            return
        if self.gate == "tanh":
            check_reach(name, layers, model)
            widest = max(model.windows[layer] for layer in layers)
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
        refuse_feedback(model, name, layers)
        check(
            not model.sliding.sinks,
            f"Window.sinks = {model.sliding.sinks} needs DenseMemory.gate = 'tanh' for "
            f"{name} = {layers}; set the gate, or no sinks",
        )
        for layer in layers:
            window = model.windows[layer]
            check(
                window == model.block_length,
                f"layer {layer} of {name} reads its block of {model.block_length} "
                f"tokens instead of a window of {window}; set DenseMemory.gate = 'tanh' or "
                "Window.block = 0",
            )


class DenseState(NamedTuple):
    """The keys and values of the last M tokens, oldest first; places without a token, at the
    beginning, are zeros. The layer has no other cache.
    """

    keys: Float[Array, "B M G K"]
    values: Float[Array, "B M G K"]
    length: Int[Array, " B"]  # The number of tokens, which all belong to the current document.


_BY_KEY_HEAD = ("lanes", None, "kv_heads", None)
_BY_QUERY_HEAD = ("lanes", None, "heads", None)


def dense_state(model: Model) -> DenseState:
    shape = (model.of(DenseMemory).size, model.key_heads, model.head_dim)
    keys = state_array(shape, _BY_KEY_HEAD[1:])
    return DenseState(keys, keys, state_array((), (), "int32"))


def dense_memory_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, in which attention to the window is
    replaced by attention to the memory and to the tokens of the block up to the token itself.
    """
    m = model
    keys = m.of(DenseMemory).size + keys_before(m, m.window) - m.window
    return window_flops(m) + 4 * m.heads * m.head_dim * keys


class DenseMemoryLayer(nn.Module):
    """A layer whose tokens attend, with one softmax, to their own block and to a memory of the last
    M tokens before the block. The layer has no position biases.

    The authors of MELODI compare their model with a model of such layers, which they call
    Memorizing Transformer. Unlike in the original Memorizing Transformer, a token attends to all
    tokens of the memory instead of the results of a search, and no gate mixes memory and block.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        unplaced = dataclasses.replace(self.model, positions="none")
        self.tokens = TransformerBlock(unplaced, False, self.training, self.kernels)

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Attends block by block, because all attention weights at once would need much memory."""
        m, size = self.model, self.model.of(DenseMemory).size
        queries, own = self._projected(x)
        own = StateKV(*(constrain(z, *_BY_KEY_HEAD) for z in own))
        past = _followed_by(given.state, own)
        start = constrain(given.document_start, "lanes", None)
        lengths = counts_before(given.state.length, start, added=m.window, size=size)

        def attend_in_block(
            n: Int[Array, ""], own: Array, seen: list[Array], dropout: Dropout | None
        ) -> Array:
            length = jnp.take(lengths, n, axis=1)
            places = jnp.arange(m.window)[None]
            return self._read(own, StateKV(*seen), length, places, dropout)

        read = attend_by_block(
            attend_in_block, constrain(queries, *_BY_QUERY_HEAD), past, start.shape[1],
            size=size + m.window, axis=1, dropout=token_dropout(self),
        )  # fmt: skip
        y = self.tokens.finish(x, [read])
        return LayerOutput(y, self._after(past, lengths[:, -1]))

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T H K"], StateKV]:
        projections = self.tokens.project(x)
        keys = self.tokens.normalized_keys(projections.keys)
        return self.tokens.scaled_queries(projections.queries), StateKV(keys, projections.values)

    def _read(
        self,
        queries: Float[Array, "B Q H K"],
        seen: StateKV,
        length: Int[Array, " B"],
        places: Int[Array, "R Q"],
        dropout: Dropout | None = None,
    ) -> Float[Array, "B Q H K"]:
        # Computes the attention of the tokens at `places` of a block. `seen` holds the keys and
        # values of the memory, followed by those of the block. If R is 1, all rows have the same
        # places.
        m, size = self.model, self.model.of(DenseMemory).size
        columns = jnp.arange(seen.keys.shape[1])[None]
        valid = (columns >= size) | (columns >= size - length[:, None])
        # If `Window.mask_empty_cache` is False, queries also attend to entries of the memory that
        # hold no token. These entries count as keys and values of zeros.
        if not m.sliding.mask_empty_cache:
            kept = valid[:, :, None, None]
            seen = StateKV(*(jnp.where(kept, z, 0) for z in seen))
            valid = jnp.ones_like(valid)
        last = places + size - (0 if m.sliding.attend_to_self else 1)
        mask = valid[:, None] & (columns[None] <= last[..., None])
        keys, values = (spread_over_devices(z, m.heads, _BY_QUERY_HEAD) for z in seen)
        part = attend_part(
            queries, keys, values, mask, dropout, implementation=self.kernels.masked_attention
        )
        return part.output

    def _after(self, past: StateKV, length: Int[Array, " B"]) -> DenseState:
        size = self.model.of(DenseMemory).size
        keys, values = (last_entries(z, size, length) for z in past)
        return DenseState(keys, values, length)

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        m = self.model
        shape = (len(given.state.length), m.window, m.key_heads, m.head_dim)
        zeros = jnp.zeros(shape, compute_dtype(m))
        return LayerOutput(x, StateKV(zeros, zeros))

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        """Adds the key and the value of the token to the open block; the memory does not change."""
        queries, own = self._projected(x)
        block = with_token(given.block, own, given.position)
        seen = _followed_by(given.state, block)
        read = self._read(queries, seen, given.state.length, given.position[:, None])
        return LayerOutput(self.tokens.finish(x, [read]), block)

    def end_block(self, x: None, given: Given) -> LayerOutput:
        size = self.model.of(DenseMemory).size
        length = jnp.minimum(given.state.length + self.model.window, size)
        return LayerOutput(x, self._after(_followed_by(given.state, given.block), length))


def _followed_by(state: DenseState, tokens: StateKV) -> StateKV:
    keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(state[:2], tokens, strict=True))
    return StateKV(keys, values)


def gated_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer and of attention to the tokens of the
    memory that have left a token's window, on average over the tokens of a block.
    """
    m = model
    beyond = max(m.of(DenseMemory).size + keys_before(m, m.block_length) - m.window, 0)
    return window_flops(m) + 4 * m.heads * m.head_dim * beyond


class GatedMemoryLayer(PastTokensLayer):
    """A sliding-window layer that reads a memory of past tokens through a gate.

    A head computes two attention outputs: `local` from the window alone, and `both` from the window
    and the memory with one softmax. The output of the head is local + tanh(gate) (both - local),
    with a learned number `gate` for each head. The gate is 0 in a new layer, which therefore
    computes the same as a sliding-window layer. Position biases treat all keys of the memory like
    the farthest key of the window.
    """

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
        m, size = self.model, self.model.of(DenseMemory).size
        columns = jnp.arange(size)
        farthest = m.window - 1 if m.sliding.attend_to_self else m.window
        beyond = (readers.places[..., None] + size - columns[None, None]) > farthest

        def attend_in_block(
            n: Int[Array, ""], own: Array, seen: list[Array], dropout: Dropout | None
        ) -> AttentionPart:
            keys, values = (part.swapaxes(1, 2) for part in seen)
            valid = columns[None] >= size - jnp.take(readers.counts, n, axis=1)[:, None]
            return attend_part(
                own, keys, values, valid[:, None] & beyond, dropout,
                implementation=self.kernels.masked_attention,
            )  # fmt: skip

        return attend_by_block(
            attend_in_block, constrain(queries, *_BY_QUERY_HEAD), past, readers.counts.shape[1],
            size=size, axis=2, dropout=token_dropout(self),
        )  # fmt: skip


register_kind(
    "dense_memory",
    LayerKind(
        DenseMemoryLayer, dense_state, {"memory": ("keys", "values", "length")},
        dense_memory_flops, DenseMemory,
    ),
)  # fmt: skip
register_kind(
    "gated_dense_memory",
    LayerKind(
        GatedMemoryLayer, lambda model: memory_state(model, model.of(DenseMemory).size),
        {"cache": ("window",), "memory": ("keys", "values", "length")}, gated_flops, DenseMemory,
    ),
)  # fmt: skip
