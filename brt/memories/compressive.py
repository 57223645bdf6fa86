"""Layers that remember older blocks in compressed form: a few tokens of an older block become one
vector (Compressive Transformers for Long-Range Sequence Modelling, arXiv 1911.05507, section 3).

A slot is a vector that stands for R neighbouring tokens of an older block. In shapes, C is the
number of slots of the memory, S of slots of a block of W tokens, Q of queries of a block, and Z of
entries of an array in which new entries follow old ones. The other letters of shapes are those of
`brt.layers.state`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.config.checks import check
from brt.config.fields import adaptable
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import Mix
from brt.layers.basic import ZEROS, compute_dtype, kernel_init, parameter
from brt.layers.cache import KVCache, closed_window, with_cache
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_rotary, require_cache
from brt.layers.state import (
    Given,
    LayerAux,
    LayerOutput,
    WindowState,
    cache_is_readable,
    open_block,
    state_array,
    window_state,
    with_token,
)
from brt.layers.window import WindowLayer, keys_before, window_flops
from brt.memories.past_tokens import counts_before, last_entries
from brt.ops.dense import dense
from brt.ops.partial_attention import AttentionPart, attend_to_part, merge_parts
from brt.ops.products import matmul_nt
from brt.ops.recurrent_attention import StateKV
from brt.ops.reductions import add_shared
from brt.ops.softmax import MASKED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressive(KindSection):
    """Settings of layers of the Compressive Transformer, which compress older blocks."""

    kind: ClassVar[str] = "compressive"
    positive: ClassVar[tuple[str, ...]] = ("slots", "rate")

    layers: tuple[int, ...] = adaptable(())  # The layers with these indices are of this kind.
    # The memory has this many slots. A slot is a vector into which `rate` tokens were compressed.
    slots: int = adaptable(512)
    rate: int = adaptable(2)  # This many tokens are compressed into one slot.

    def check_model(self, model: Model) -> None:
        """Requires a rate that divides the window, a cache, and positions that are not rotary."""
        name, layers = "Compressive.layers", self.layers
        check(
            not layers or model.window % self.rate == 0,
            f"Model.window = {model.window} must be a multiple of Compressive.rate = {self.rate}",
        )
        refuse_rotary(model, layers, f"has no positions for the slots of {name} = {layers}")
        require_cache(model, name, layers, "the previous block")


class Convolution(NamedTuple):
    """The weights of a convolution that maps R tokens to a slot of E numbers. The stride of the
    convolution equals its width.
    """

    kernel: Float[Array, "R D E"]
    bias: Float[Array, " E"]


def compress(
    x: Float[Array, "*B W D"], rate: int, convolution: Convolution
) -> Float[Array, "*B S D"]:
    """Returns the S = W / `rate` slots of a block, oldest first, in float32. Each slot is the
    output of the convolution for `rate` neighbouring tokens.
    """
    groups = x.reshape(*x.shape[:-2], -1, rate, x.shape[-1])
    return add_shared(dense(groups, convolution.kernel, 2).astype(jnp.float32), convolution.bias)


def sliding_windows(x: Float[Array, "B Z *D"], blocks: int, *, step: int, size: int) -> Array:
    """Returns `blocks` overlapping slices of x along axis 1, as an array [B, N, size, *D]. Slice n
    has the `size` entries of x from index n * `step` on.
    """
    return jnp.stack([x[:, n * step : n * step + size] for n in range(blocks)], axis=1)


def attention_reconstruction_error(
    queries: Float[Array, "B N Q H K"],
    exact: tuple[Float[Array, "B N W H K"], Float[Array, "B N W H K"]],
    slots: tuple[Float[Array, "B N S H K"], Float[Array, "B N S H K"]],
) -> Float[Array, "B N"]:
    """Returns the loss of a learned compression: the mean squared difference between
    attention to a block's tokens (`exact`) and attention to its slots.

    Logits are products of queries and keys without a bias. Only `slots` receives a gradient.
    """
    queries, exact = jax.lax.stop_gradient((queries, exact))

    def attend(keys: Array, values: Array) -> Array:
        q, k, v = (x.swapaxes(2, 3) for x in (queries, keys, values))
        return attend_to_part(matmul_nt(q, k), v).output

    return jnp.mean(jnp.square(attend(*slots) - attend(*exact)), axis=(2, 3, 4))


class CompressedState(NamedTuple):
    """The cache, the inputs of the cached block, and the compressed slots."""

    window: WindowState
    # The layer's inputs for the cached block, which are compressed at the end of the next block.
    inputs: Float[Array, "B W D"]
    # Slots of older blocks in float32, oldest first; unused slots, at the beginning, are zeros.
    vectors: Float[Array, "B C D"]
    length: Int[Array, " B"]  # The number of used slots, which all belong to the current document.


class CompressedBlock(NamedTuple):
    """Data of an open block: the layer's inputs for the block's tokens, and the keys and values of
    the slots that these tokens read.
    """

    inputs: Float[Array, "B W D"]
    slots: StateKV


def compressed_state(model: Model) -> CompressedState:
    def vectors(count: int, dtype: str | None = None) -> Any:
        return state_array((count, model.model_dim), (None, None), dtype)

    slots = vectors(model.of(Compressive).slots, "float32")
    length = state_array((), (), "int32")
    return CompressedState(window_state(model), vectors(model.window), slots, length)


def compressive_flops(model: Model) -> int:
    """Returns the FLOPs per token of a sliding-window layer, of attention to slots and to keys that
    left the window, of the projections of slots to keys and values, and of the compression.
    """
    section, m, width = model.of(Compressive), model, model.heads * model.head_dim
    # For each key of its own block that a token sees, one key of the previous block has left the
    # token's window.
    passed_keys = keys_before(m, m.window)
    keys = 4 * m.model_dim * width * section.slots // m.window
    # The FLOPs of the auxiliary loss that trains the compression are not included.
    reads = 4 * width * (section.slots + passed_keys)
    return window_flops(m) + reads + keys + 2 * m.model_dim**2


class CompressiveLayer(WindowLayer):
    """A layer of the Compressive Transformer.

    A token attends to its window as in a sliding-window layer, and also to keys that left the
    window. The keys of the previous block are read uncompressed. Older blocks are read as slots; a
    slot stands for `Compressive.rate` tokens. When the memory is full, new slots replace the oldest
    slots. Position biases treat all keys that left the window like the farthest key of the window.

    The loss of the language model gives the compression no gradient. The compression is trained by
    an auxiliary loss: attention to the slots of a block should equal attention to the block.
    """

    def setup(self) -> None:
        super().setup()
        m, section = self.model, self.model.of(Compressive)
        self.section = section
        shape = (section.rate, m.model_dim, m.model_dim)
        kernel = parameter(
            self, "compressor_kernel", shape, (None, "embed", None), kernel_init(inputs=2)
        )
        bias = parameter(self, "compressor_bias", (m.model_dim,), ("embed",), ZEROS)
        self.compressor = Convolution(kernel, bias)

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Lets all blocks attend at once. Each block reads its own part of the slots and tokens."""
        state = given.state
        m, blocks, size = self.model, given.document_start.shape[1], self.section.slots
        projections = self.tokens.project(x)
        past, window = with_cache(m, given, projections)
        inputs = jnp.concatenate([state.inputs, constrain(x, "lanes", None, None)], axis=1)
        before = jax.lax.stop_gradient(
            sliding_windows(inputs, blocks, step=m.window, size=m.window)
        )
        made = self._compressed(before)
        added = made.shape[2]
        vectors = jnp.concatenate([state.vectors, made.reshape(len(x), -1, m.model_dim)], axis=1)
        length = counts_before(state.length, ~past.cache_mask, added=added, size=size, delay=1)
        slots = jax.tree.map(
            lambda part: sliding_windows(part, blocks, step=added, size=size), self._slots(vectors)
        )
        keys, values = past.joined(projections)
        tokens = jax.tree.map(
            lambda part: sliding_windows(part, blocks, step=m.window, size=m.window),
            StateKV(self.tokens.normalized_keys(keys), values),
        )
        beyond = jnp.arange(m.window)[:, None] >= jnp.arange(m.window)[None] + self._nearest()
        mix = self._mix(slots, tokens, length[:, :-1], past.cache_mask, beyond[None])
        y = self.tokens.attend(projections, past, given.feedback, mix)
        after = self._after(window, inputs[:, -m.window :], vectors, length[:, -1])
        queries = self.tokens.scaled_queries(projections.queries)
        return LayerOutput(y, after, self._aux(queries, tokens, made, past))

    def _nearest(self) -> int:
        return 0 if self.model.sliding.attend_to_self else 1

    def _compressed(self, x: Float[Array, "*B W D"]) -> Float[Array, "*B S D"]:
        return compress(x, self.section.rate, self.compressor)

    def _slots(self, vectors: Float[Array, "B S D"]) -> StateKV:
        # Keys and values of the slots are computed with the current weights.
        constant = jax.lax.stop_gradient(vectors)
        return self.tokens.project_kv(constant.astype(compute_dtype(self.model)))

    def _after(
        self,
        window: WindowState,
        inputs: Float[Array, "B W D"],
        vectors: Float[Array, "B Z D"],
        length: Int[Array, " B"],
    ) -> CompressedState:
        kept = last_entries(vectors, self.section.slots, length)
        return CompressedState(window, inputs, kept, length)

    def _mix(
        self,
        slots: StateKV,
        before: StateKV,
        length: Int[Array, "B N"],
        cache_mask: Bool[Array, "B N"],
        beyond: Bool[Array, "R Q W"],
    ) -> Mix:
        # `before` has the keys and values of the block before each block, and `cache_mask` is True
        # where a block may read them. `length` is the number of slots that a block can read.
        # `beyond` is True for the keys of `before` that have left a token's window. R is 1 if
        # `beyond` is the same for all rows of the batch; otherwise R is B.
        size = self.section.slots
        valid = jnp.arange(size)[None, None] >= size - length[..., None]
        valid = jnp.broadcast_to(valid[:, :, None], (*length.shape, beyond.shape[1], size))
        seen = jnp.concatenate([valid, beyond[:, None] & cache_mask[..., None, None]], axis=-1)
        keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(slots, before, strict=True))

        keys, values = (x.swapaxes(2, 3) for x in (keys, values))
        bias = self.tokens.far_bias()[None, None, :, None, None]

        def attend_beyond_window(queries: Array, part: AttentionPart) -> Array:
            # One softmax covers the window and the older keys. All older keys have the same bias.
            q, *near = (_by_block(x, length.shape[1]).swapaxes(2, 3) for x in (queries, *part))
            logits = jnp.where(seen[:, :, None], matmul_nt(q, keys) + bias, MASKED)
            output = merge_parts([AttentionPart(*near), attend_to_part(logits, values)]).output
            return output.swapaxes(2, 3).astype(values.dtype).reshape(queries.shape)

        return attend_beyond_window

    def _aux(
        self,
        queries: Float[Array, "B T H K"],
        before: StateKV,
        made: Float[Array, "B N S D"],
        past: KVCache,
    ) -> LayerAux:
        # A block that cannot read the block before it has the loss 0.
        m = self.model
        rows = made.reshape(len(made), -1, m.model_dim).astype(compute_dtype(m))
        slots = (_by_block(x, made.shape[1]) for x in self.tokens.project_kv(rows, learns=False))
        queries = _by_block(queries, made.shape[1])
        errors = attention_reconstruction_error(queries, tuple(before), tuple(slots))
        loss = jnp.mean(jnp.where(past.cache_mask, errors, 0))
        return LayerAux(losses={"compression": loss})

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        """Computes the keys and values of the slots once for all tokens of the block."""
        memory = CompressedBlock(
            jnp.zeros_like(given.state.inputs), self._slots(given.state.vectors)
        )
        return LayerOutput(x, open_block(given, memory))

    def mix_step(self, given: Given) -> Mix:
        window = given.state.window
        before = StateKV(self.tokens.normalized_keys(window.keys), window.values)
        slots, before = jax.tree.map(lambda part: part[:, None], (given.block.memory.slots, before))
        cache_mask = cache_is_readable(self.model, window)
        left = jnp.arange(self.model.window) + self._nearest()
        beyond = given.position[:, None, None] >= left[None, None]
        length = jnp.where(cache_mask, given.state.length, 0)
        return self._mix(slots, before, length[:, None], cache_mask[:, None], beyond)

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        y, block, *_ = super().decode_step(x, given)
        inputs = with_token(block.memory.inputs, x, given.position)
        return LayerOutput(y, block._replace(memory=block.memory._replace(inputs=inputs)))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        """Compresses the cached block to slots, and then makes the open block the cache."""
        state = given.state
        made = self._compressed(state.inputs)
        vectors = jnp.concatenate([state.vectors, made], axis=1)
        length = jnp.minimum(state.length + made.shape[1], self.section.slots)
        length = jnp.where(cache_is_readable(self.model, state.window), length, 0)
        window = closed_window(self.model, given)
        return LayerOutput(x, self._after(window, given.block.memory.inputs, vectors, length))


def _by_block(x: Float[Array, "B T ..."], blocks: int) -> Float[Array, "B N W ..."]:
    return x.reshape(len(x), blocks, -1, *x.shape[2:])


register_kind(
    "compressive",
    LayerKind(
        CompressiveLayer, compressed_state,
        {"cache": ("window", "inputs"), "memory": ("vectors", "length")},
        compressive_flops, Compressive,
    ),
)  # fmt: skip
