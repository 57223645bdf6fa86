"""Layers that compute a few vectors as a summary of every block, for the layer above and for the
next block (MELODI, arXiv 2410.03156).

A layer reads the W tokens of a block, followed by U vectors that summarise the block and come
from the layer below. Each of these P = W + U places attends to the places of the block up to
itself, and to the short-term memory: S vectors that the layer computed from the previous block. A
layer of the kind "long_summary" also attends to a long-term memory of M vectors that it computed
from many blocks; new vectors replace the oldest. All memory vectors are weighted sums of the
layer's outputs at the places of a block. The memories are float32, whatever the dtype of caches.
In shapes, O is the number of weighted sums, and Z of keys of the short-term memory and a block. The
other letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    ONES,
    ZEROS,
    compute_dtype,
    parameter,
    token_dropout,
    unrolled,
)
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_feedback, refuse_rotary
from brt.layers.state import Given, LayerOutput, state_array, with_token
from brt.layers.window import window_flops
from brt.ops.masked_attention import attend
from brt.ops.normalization import rms_norm
from brt.ops.products import einsum_float32
from brt.ops.recurrent_attention import StateKV
from brt.ops.window_attention import circulant

_SHORT, _LONG = "summary", "long_summary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summaries(KindSection):
    """Settings of the layers of MELODI, which summarise every block for the layer above and for the
    next block.

    The section is for two kinds of layers. The kinds share a section because all layers must have
    the same number of summaries.
    """

    kind: ClassVar[str] = _SHORT
    positive: ClassVar[tuple[str, ...]] = (
        "summaries", "short_memory", "long_memory", "long_increment",
    )  # fmt: skip

    # The layers with these indices are summary layers without a long-term memory.
    layers: tuple[int, ...] = adaptable(())
    # The layers with these indices are summary layers with a long-term memory.
    long_layers: tuple[int, ...] = adaptable(())
    summaries: int = adaptable(128)  # This many vectors summarise a block for the layer above.
    short_memory: int = adaptable(128)  # A block passes this many vectors to the next block.
    long_memory: int = adaptable(8192)  # The long-term memory has this many vectors.
    long_increment: int = adaptable(64)  # A block adds this many vectors to the long-term memory.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            not self.long_layers or self.long_memory % self.long_increment == 0,
            f"Summaries.long_memory = {self.long_memory} must be a multiple of "
            f"Summaries.long_increment = {self.long_increment}",
        )

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        return {_SHORT: self.layers, _LONG: self.long_layers}

    def field_of(self, kind: str) -> str:
        return "Summaries.long_layers" if kind == _LONG else "Summaries.layers"

    def check_model(self, model: Model) -> None:
        """Refuses rotary positions and `Model.feedback`."""
        for kind, layers in self.layers_by_kind().items():
            name = self.field_of(kind)
            refuse_rotary(model, layers, f"has no positions for the vectors of {name} = {layers}")
            refuse_feedback(model, name, layers)


class SummaryState(NamedTuple):
    """The short-term memory, computed from the last block; zeros before the first block."""

    vectors: Float[Array, "B S D"]
    # False if no block has been read since the state was created or reset, so that there is no
    # memory to read. The layer resets the state where a document starts.
    valid: Bool[Array, " B"]

    @property
    def short(self) -> "SummaryState":
        """Returns this state, because layers read the attribute `short` of both types of states."""
        return self


class LongSummaryState(NamedTuple):
    """A short-term and a long-term memory, oldest vector first; unused places are zeros."""

    short: SummaryState
    vectors: Float[Array, "B M D"]
    # The number of vectors of the current document; they fill the last places of `vectors`.
    length: Int[Array, " B"]


def summary_state(model: Model) -> SummaryState:
    shape = (model.of(Summaries).short_memory, model.model_dim)
    return SummaryState(state_array(shape, (None, None), "float32"), state_array((), (), "bool"))


def long_summary_state(model: Model) -> LongSummaryState:
    shape = (model.of(Summaries).long_memory, model.model_dim)
    vectors = state_array(shape, (None, None), "float32")
    return LongSummaryState(summary_state(model), vectors, state_array((), (), "int32"))


def summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer with a short-term memory.

    The count is that of a sliding-window layer, in which attention to the window is replaced by
    attention to the block and to the short-term memory. Two numbers are added: the FLOPs of reading
    the summaries of the layer below, which are processed like tokens, and the FLOPs of the weighted
    sums that become the next memory and the summaries for the layer above.
    """
    section, m, width = model.of(Summaries), model, model.heads * model.head_dim
    places = m.window + section.summaries
    projection, attention = 2 * m.model_dim * width, 4 * width
    dense = 4 * projection + 4 * m.model_dim * m.mlp_dim
    # A block has `places` tokens and summaries. A token or summary attends to `keys` keys, on
    # average.
    keys = section.short_memory + places // 2
    mixes = 2 * m.model_dim * (section.short_memory + section.summaries)
    block = section.summaries * dense + places * (attention * keys + mixes)
    extra = (block + section.short_memory * 2 * projection) // m.window
    return window_flops(m) + extra - attention * m.window


def long_summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer that also has a long-term memory.

    The projection of the long-term memory to keys and values at the start of a segment is not
    counted, because it is computed only once per segment.
    """
    section, m, width = model.of(Summaries), model, model.heads * model.head_dim
    places = m.window + section.summaries
    reading = 4 * width * section.long_memory + 2 * m.model_dim * section.long_increment
    new_keys = 4 * m.model_dim * width * section.long_increment
    return summary_flops(m) + (places * reading + new_keys) // m.window


class Memories(NamedTuple):
    """The memories that a block attends to: the state before the block, and the keys and values of
    the long-term memory, if the layer has one.
    """

    state: Any
    long: StateKV | None


class SummaryBlock(NamedTuple):
    """An open block: keys, values and outputs of its tokens; keys and values of the memories."""

    keys: Float[Array, "B W H K"]
    values: Float[Array, "B W H K"]
    outputs: Float[Array, "B W D"]
    short: StateKV
    long: StateKV | None


class Tokens(NamedTuple):
    """The P places (tokens, then summaries) of N blocks."""

    inputs: Float[Array, "B N P D"]
    queries: Float[Array, "B N P H K"]
    keys: Float[Array, "B N P H K"]
    values: Float[Array, "B N P H K"]


class TokenMix(nn.Module):
    """A module that computes O = `size` learned weighted sums over the W tokens and U summaries of
    a block, in float32.

    If `residual` is True, the inputs are normalised, and the summaries are added to the sums. O
    must then equal U.
    """

    model: Model
    size: int
    residual: bool

    @nn.compact
    def __call__(
        self, tokens: Float[Array, "B W D"], summaries: Float[Array, "B U D"]
    ) -> Float[Array, "B O D"]:
        places = self.model.window + self.model.of(Summaries).summaries
        kernel = parameter(self, "kernel", (places, self.size), (None, None))
        bias = parameter(self, "bias", (self.size,), (None,), ZEROS)
        mixed = tokens, summaries
        if self.residual:
            token_norm, summary_norm = (
                parameter(self, name, (self.model.model_dim,), ("embed",), ONES)
                for name in ("token_norm", "summary_norm")
            )
            mixed = rms_norm(tokens, token_norm), rms_norm(summaries, summary_norm)
        z = jnp.concatenate(mixed, axis=1)
        y = einsum_float32("bpd,po->bod", z, kernel.astype(z.dtype)) + bias[None, :, None]
        return y + summaries if self.residual else y


class SummaryLayer(nn.Module):
    """A layer in which every block passes vectors, the short-term memory, to the next block."""

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()
    remembers: ClassVar[bool] = False  # True for layers with a long-term memory.

    def setup(self) -> None:
        m, section = self.model, self.model.of(Summaries)
        self.section = section
        self.tokens = TransformerBlock(m, False, self.training, self.kernels)
        self.summary_mix = TokenMix(m, section.summaries, residual=True)
        same = section.short_memory == section.summaries
        self.short_mix = TokenMix(m, section.short_memory, residual=same)
        if self.remembers:
            self.long_mix = TokenMix(m, section.long_increment, residual=False)
            self.memory_gate = parameter(
                self, "memory_gate", (m.heads, m.head_dim), ("heads", "head_dim"),
                nn.initializers.truncated_normal(0.25),
            )  # fmt: skip

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Computes the projections of all blocks at once; then the blocks are read one by one,
        because each block reads the memory that the previous block has changed.
        """
        m, blocks, shape = self.model, given.document_start.shape[1], x.shape
        # The blocks are read one after the other, so every device needs all blocks of its rows.
        x = constrain(x, "lanes", None, None).reshape(len(x), blocks, m.window, m.model_dim)
        summaries = constrain(given.summaries, "lanes", None, None, None)
        z = jnp.concatenate([x, summaries], axis=2)
        projected = self._projected(z.reshape(len(z), -1, m.model_dim))
        heads = (*z.shape[:3], m.heads, m.head_dim)
        tokens = Tokens(z, *(part.reshape(heads) for part in projected))
        scan = nn.scan(
            SummaryLayer._read_block,
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=(1, 1, nn.broadcast),
            out_axes=1,
            unroll=unrolled(m.unroll, blocks, BLOCKS_AT_ONCE),
            # With this check, Flax traces the function a second time. Only the initialisation of
            # parameters needs the check.
            check_constancy_invariants=self.is_initializing(),
        )
        memories = Memories(given.state, self._long(given.state))
        memories, (x, summaries) = scan(self, memories, tokens, given.document_start, self._bias())
        x = constrain(x.reshape(shape), "lanes", "tokens", None)
        return LayerOutput(x, memories.state, summaries=summaries)

    def _projected(self, x: Float[Array, "B T D"]) -> tuple[Array, Array, Array]:
        projections = self.tokens.project(x)
        queries = self.tokens.scaled_queries(projections.queries)
        return queries, self.tokens.normalized_keys(projections.keys), projections.values

    def _read_block(
        self,
        memories: Memories,
        block: Tokens,
        start: Bool[Array, " B"],
        bias: Float[Array, "H P Z"] | None,
    ) -> tuple[Memories, tuple[Float[Array, "B W D"], Float[Array, "B U D"]]]:
        memories = jax.tree.map(
            lambda x: jnp.where(_along(start, x), jnp.zeros_like(x), x), memories
        )
        own, short = StateKV(block.keys, block.values), self._short(memories.state)
        attended = self._attend(block.queries, own, short, memories, bias, jnp.zeros((), jnp.int32))
        z = self.tokens.finish(block.inputs, [attended])
        x, u = jnp.split(z, [self.model.window], axis=1)
        memories, u = self._after(memories, x, u)
        return memories, (x, u)

    def _attend(
        self,
        queries: Float[Array, "B Q H K"],
        own: StateKV,
        short: StateKV,
        memories: Memories,
        bias: Float[Array, "H Q Z"] | None,
        first: Int[Array, ""],
    ) -> Float[Array, "B Q H K"]:
        # Computes the attention of Q neighbouring places of a block, of which `first` is the
        # lowest. `own` has the keys and values of the block.
        section = self.section
        m, state, implementation = self.model, memories.state, self.kernels.masked_attention
        # If `Window.mask_empty_cache` is False, places without a vector count as keys of zeros.
        nulls = not m.sliding.mask_empty_cache
        keys, values = (jnp.concatenate(pair, axis=1) for pair in zip(short, own, strict=True))
        columns = jnp.arange(keys.shape[1])
        distance = self._distance(first + jnp.arange(queries.shape[1]))[:, : len(columns)]
        valid = (columns >= section.short_memory)[None] | state.short.valid[:, None] | nulls
        seen = (distance >= 0)[None] & valid[:, None]
        y = attend(
            queries, keys, values, bias, seen, token_dropout(self), implementation=implementation
        )
        if memories.long is None:
            return y
        valid = jnp.arange(section.long_memory)[None] >= section.long_memory - state.length[:, None]
        far = attend(
            queries, *memories.long, None, (valid | nulls)[:, None], token_dropout(self),
            implementation=implementation,
        )  # fmt: skip
        # `kept` is the weight of attention to the block and the short-term memory. It is 1 if the
        # long-term memory is empty, so that an empty memory has no influence.
        kept = jnp.where(_along((state.length > 0) | nulls, y), nn.sigmoid(self.memory_gate), 1)
        return (kept * y + (1 - kept) * far).astype(y.dtype)

    def _after(
        self, memories: Memories, x: Float[Array, "B W D"], u: Float[Array, "B U D"]
    ) -> tuple[Memories, Float[Array, "B U D"]]:
        # Returns the memories after a block, and the summaries for the layer above.
        section = self.section
        state, long, above = memories.state, memories.long, self.summary_mix(x, u).astype(u.dtype)
        short = SummaryState(self.short_mix(x, u), jnp.ones_like(state.short.valid))
        if not isinstance(state, LongSummaryState):
            return Memories(short, None), above
        new = self.long_mix(x, u)
        vectors = _appended(state.vectors, new)
        length = jnp.minimum(state.length + section.long_increment, section.long_memory)
        if long is not None:
            long = StateKV(*map(_appended, long, self._memory(new)))
        return Memories(LongSummaryState(short, vectors, length), long), above

    def _memory(self, vectors: Float[Array, "B S D"]) -> StateKV:
        return self.tokens.project_kv(vectors.astype(compute_dtype(self.model)))

    def _short(self, state: Any) -> StateKV:
        return self._memory(state.short.vectors)

    def _long(self, state: Any) -> StateKV | None:
        return self._memory(state.vectors) if self.remembers else None

    def _distance(self, places: Int[Array, " Q"]) -> Int[Array, "Q Z"]:
        # Returns, for the query at each place, the distance of every key from the nearest key that
        # the query sees. The keys of the short-term memory come before the keys of the block.
        m, section = self.model, self.section
        columns = jnp.arange(section.short_memory + m.window + section.summaries)
        nearest = 0 if m.sliding.attend_to_self else 1
        return places[:, None] + (section.short_memory - nearest) - columns[None]

    def _row(self) -> Float[Array, "H Z"] | None:
        section = self.section
        return self.tokens.bias(section.short_memory + self.model.window + section.summaries)

    def _bias(self) -> Float[Array, "H P Z"] | None:
        m, section, row = self.model, self.section, self._row()
        if row is None:
            return None
        # `last` is the distance between place 0 of the block and key 0, which is the first vector
        # of the short-term memory.
        last = section.short_memory - (0 if m.sliding.attend_to_self else 1)
        return circulant(jnp.roll(row, -last, axis=1), m.window + section.summaries)

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        """Returns an empty block with the memories' keys and values, which all its tokens read."""
        m, dtype = self.model, compute_dtype(self.model)
        keys = jnp.zeros((len(given.state.short.vectors), m.window, m.heads, m.head_dim), dtype)
        outputs = jnp.zeros((*keys.shape[:2], m.model_dim), dtype)
        block = SummaryBlock(keys, keys, outputs, self._short(given.state), self._long(given.state))
        return LayerOutput(x, block)

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        block, position = given.block, given.position
        queries, *kv = self._projected(x)
        own = with_token(StateKV(block.keys, block.values), StateKV(*kv), position)
        bias = self._row()
        if bias is not None:
            columns = self.section.short_memory + self.model.window
            distance = self._distance(position)[:, :columns]
            bias = jnp.moveaxis(jnp.take(bias, jnp.maximum(distance, 0), axis=1), 1, 0)[:, :, None]

        # Every row has its own place, and therefore its own biases.
        def attend_row(given: tuple, bias: Array | None, place: Array) -> Float[Array, "1 H K"]:
            queries, own, short, memories = jax.tree.map(lambda x: x[None], given)
            return self._attend(queries, own, short, memories, bias, place)[0]

        memories = Memories(given.state, block.long)
        y = jax.vmap(attend_row)((queries, own, block.short, memories), bias, position)
        y = self.tokens.finish(x, [y])
        outputs = with_token(block.outputs, y, position)
        block = block._replace(keys=own.keys, values=own.values, outputs=outputs)
        return LayerOutput(y, block)

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Processes the summaries of the layer below, which attend to all tokens of the block."""
        block = given.block
        window, u = self.model.window, given.summaries[:, 0]
        queries, *kv = self._projected(u)
        pairs = zip((block.keys, block.values), kv, strict=True)
        own = StateKV(*(jnp.concatenate(pair, axis=1) for pair in pairs))
        bias = self._bias()
        y = self._attend(
            queries, own, block.short, Memories(given.state, block.long),
            None if bias is None else bias[:, window:], jnp.asarray(window),
        )  # fmt: skip
        u = self.tokens.finish(u, [y])
        memories, u = self._after(Memories(given.state, None), block.outputs, u)
        return LayerOutput(x, memories.state, summaries=u[:, None])


class LongSummaryLayer(SummaryLayer):
    """A `SummaryLayer` that also has a long-term memory, to which every block adds some vectors."""

    remembers: ClassVar[bool] = True


def _along(lanes: Bool[Array, " B"], like: Array) -> Bool[Array, "B ..."]:
    return lanes.reshape(-1, *[1] * (like.ndim - 1))


def _appended(old: Float[Array, "B M *X"], new: Float[Array, "B L *X"]) -> Float[Array, "B M *X"]:
    return jnp.concatenate([old, new.astype(old.dtype)], axis=1)[:, new.shape[1] :]


register_kind(
    _SHORT,
    LayerKind(
        SummaryLayer, summary_state, {"state": ("vectors", "valid")}, summary_flops, Summaries,
        loops=True, summaries=lambda model: model.of(Summaries).summaries,
    ),
)  # fmt: skip
register_kind(
    _LONG,
    LayerKind(
        LongSummaryLayer, long_summary_state,
        {"state": ("short",), "memory": ("vectors", "length")}, long_summary_flops, Summaries,
        loops=True, summaries=lambda model: model.of(Summaries).summaries,
    ),
)  # fmt: skip
