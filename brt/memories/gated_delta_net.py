"""Layers whose memory is a matrix for each head, which every token changes by a gated delta rule
(Gated DeltaNet, Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, section 3).

The kind "gated_delta_net" has this memory in place of attention, and the kind
"window_gated_delta_net" has it in addition to attention to a window.

In shapes, K is the number of channels of a key, V of a value, and R = 2 K + V the number of
channels of a head that are convolved (query, key and value). L is the number of earlier tokens that
the convolution reads, N the number of chunks, and C the number of tokens of a chunk. The other
letters of shapes are those of `brt.layers.state`.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Model
from brt.config.fields import adaptable, inherited
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    FROM_HEADS,
    INTO_HEADS,
    MLP,
    ZEROS,
    dropout,
    kernel_init,
    mlp_flops,
    norm_parameters,
    normed,
    parameter,
    unrolled,
)
from brt.layers.cache import closed_window, with_cache
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.sections import refuse_feedback
from brt.layers.state import (
    Given,
    LayerOutput,
    LocalState,
    WindowState,
    open_block,
    state_array,
    window_state,
)
from brt.layers.window import WindowLayer, window_flops
from brt.memories.token_state import (
    CONVOLVED,
    TokenStateLayer,
    convolution,
    convolution_step,
    tokens_since_start,
)
from brt.ops import dispatch
from brt.ops.dense import dense
from brt.ops.normalization import l2_normalize, scaled_unit
from brt.ops.products import matmul_nn, matmul_nt, matmul_tn

_ALONE, _BESIDE = "gated_delta_net", "window_gated_delta_net"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(KindSection):
    """Settings of layers with a gated delta rule (Yang, Kautz, Hatamizadeh 2024), whose memory is a
    matrix for each head. The section is for two kinds of layers.
    """

    kind: ClassVar[str] = _ALONE
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True
    not_negative: ClassVar[tuple[str, ...]] = ("heads", "key_dim", "value_dim")

    # The layers with these indices have a memory in place of attention.
    layers: tuple[int, ...] = adaptable(())
    # The layers with these indices have a memory in addition to attention to a window. A new memory
    # outputs zeros, so that these layers begin as sliding-window layers.
    window_layers: tuple[int, ...] = adaptable(())
    heads: int = inherited(0)  # Number of matrices of a layer; 0 takes Model.heads.
    key_dim: int = inherited(0)  # Number of rows of a matrix; 0 takes Model.head_dim.
    value_dim: int = inherited(0)  # Number of columns of a matrix; 0 takes Model.head_dim.

    def sizes(self, model: Model) -> tuple[int, int, int]:
        """Returns the number of heads, and the numbers of channels of a key and of a value."""
        dim = model.head_dim
        return self.heads or model.heads, self.key_dim or dim, self.value_dim or dim

    def layers_by_kind(self) -> dict[str, tuple[int, ...]]:
        return {_ALONE: self.layers, _BESIDE: self.window_layers}

    def field_of(self, kind: str) -> str:
        return f"GatedDeltaNet.{'window_layers' if kind == _BESIDE else 'layers'}"

    def check_model(self, model: Model) -> None:
        """Refuses `Model.feedback`: layers without attention cannot attend to recurrent states."""
        refuse_feedback(model, "GatedDeltaNet.layers", self.layers)


# Matrices with at most this many rows are inverted row by row. The inverse of a larger matrix
# consists of the inverses of its two diagonal blocks and of products of matrices.
_BY_ROWS = 8


@jax.custom_vjp
def unit_lower_inverse(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    """Returns the float32 inverse of I + A for each matrix A in `below`. A is zero on and above the
    diagonal, and C is a power of two.

    XLA's own triangular solver is slow for many small matrices: it takes a hundred times as long on
    CPUs, and computes one row after the other on accelerators.
    """
    return _inverse(below)


def _inverse(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    size = below.shape[-1]
    if size <= _BY_ROWS:
        return _inverse_by_rows(below)
    half = size // 2
    first, second = _inverse(jnp.stack([below[..., :half, :half], below[..., half:, half:]]))
    corner = -_product(second, _product(below[..., half:, :half], first))
    rows = [first, jnp.zeros_like(first)], [corner, second]
    return jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)


def _inverse_by_rows(below: Float[Array, "*B C C"]) -> Float[Array, "*B C C"]:
    identity = jnp.broadcast_to(jnp.eye(below.shape[-1], dtype=below.dtype), below.shape)
    rows: list[Array] = []
    for i in range(below.shape[-1]):
        earlier = (below[..., i, j, None] * row for j, row in enumerate(rows))
        rows.append(identity[..., i, :] - sum(earlier, jnp.zeros_like(identity[..., i, :])))
    return jnp.stack(rows, axis=-2)


def _product(a: Float[Array, "*B M N"], b: Float[Array, "*B N K"]) -> Float[Array, "*B M K"]:
    # The product is float32 on all hardware.
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _inverse_backward(
    inverse: Float[Array, "*B C C"], gradient: Float[Array, "*B C C"]
) -> tuple[Float[Array, "*B C C"]]:
    transposed = inverse.swapaxes(-1, -2)
    return (-_product(transposed, _product(gradient, transposed)),)


unit_lower_inverse.defvjp(lambda below: (_inverse(below),) * 2, _inverse_backward)


class DeltaInputs(NamedTuple):
    """The inputs of the gated delta rule for the tokens of a segment.

    The state of a head is a matrix S [K, V] that maps keys to values. Token t multiplies the matrix
    by a decay, and then changes it so that it maps the token's key closer to the token's value,

        S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T

    and then reads the vector S_t^T q_t from it. The equation equals S_t = a_t (I - b_t k_t k_t^T)
    S_(t-1) + b_t k_t v_t^T, the transpose of the paper's equation 10.
    """

    queries: Float[Array, "B T H K"]  # q
    keys: Float[Array, "B T H K"]  # k, of length 1
    values: Float[Array, "B T H V"]  # v
    log_decay: Float[Array, "B T H"]  # The logarithm of a, at most 0, in float32.
    strength: Float[Array, "B T H"]  # b, between 0 and 1, in float32.


def delta_step(
    token: DeltaInputs, state: Float[Array, "B H K V"]
) -> tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """Computes the rule for one token of each row. Returns the vectors that the heads read from the
    new state, and the new state, both float32.
    """
    query, key, value = (x[:, 0].astype(jnp.float32) for x in token[:3])
    state = jnp.exp(token.log_decay[:, 0])[..., None, None] * state
    wrong = value - jnp.sum(key[..., None] * state, axis=-2)
    written = token.strength[:, 0][..., None] * wrong
    state = state + key[..., None] * written[..., None, :]
    return jnp.sum(query[..., None] * state, axis=-2)[:, None], state


def delta_rule(
    tokens: DeltaInputs,
    state: Float[Array, "B H K V"],
    since_start: Int[Array, "B T"],
    *,
    chunk: int,
    unroll: int = 1,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """Computes the gated delta rule for all tokens of a segment, in chunks. Returns the vectors
    that the tokens read from the state, and the state after the segment, both float32.

    The tokens of a chunk are computed at once (section 3.3 of the paper). Token t adds k_t u_t^T to
    the decayed state. For the tokens of a chunk, let the rows of the matrices U, K and V be the
    vectors u_t, the keys and the values, and let S be the state before the chunk. Then

        U = X (b V) - X (b d K) S

    where b is the strength of each token, d is the decay from the beginning of the chunk to each
    token, and X is the inverse of a unit lower triangular matrix. The entries of that matrix are
    products of keys, multiplied by decays and strengths. All terms without S are computed for all
    chunks at once. Then a scan over the chunks computes the states. No decay spans more than a
    chunk, and no decay is above 1, so nothing overflows.

    Args:
      since_start: the result of `brt.memories.token_state.tokens_since_start`. A document reads
        nothing from before its start.
      chunk: the largest number of tokens of a chunk, a power of two.
      unroll: the number of chunks in one iteration of the scan.
    """
    length = tokens.queries.shape[1]
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)
    padding = chunks * chunk - length
    queries, keys, values, log_decay, strength = (
        _by_chunk(x, chunk, padding) for x in tokens
    )  # Tokens of padding have the decay 1 and the strength 0, so they do not change the state.
    places = since_start[:, -1:] + 1 + jnp.arange(padding)[None]
    since = _by_chunk(jnp.concatenate([since_start, places], axis=1)[..., None], chunk, 0)
    decay, since_chunk = _decays(log_decay, since)

    dtype = queries.dtype
    scores = matmul_nt(keys, keys)
    below = jnp.tril(decay * scores * strength[..., None], -1)
    inverse = unit_lower_inverse(below).astype(dtype)
    written = matmul_nn(inverse, values * strength[..., None].astype(dtype))
    scale = (strength * since_chunk)[..., None].astype(dtype)
    erased = matmul_nn(inverse, keys * scale).astype(dtype)
    attention = (decay * matmul_nt(queries, keys)).astype(dtype)
    queries = queries * since_chunk[..., None].astype(dtype)
    keys = keys * decay[..., -1, :, None].astype(dtype)

    def body(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        # `written` and `erased` are X (b V) and X (b d K), and `kept` is the decay of the state
        # over the chunk. The queries are multiplied by the decay since the beginning of the chunk,
        # and the keys by the decay until the end of the chunk.
        queries, keys, attention, written, erased, kept = chunk
        before = state.astype(dtype)
        written = written - matmul_nn(erased, before)
        own = written.astype(dtype)
        read = matmul_nn(queries, before) + matmul_nn(attention, own)
        return kept[..., None, None] * state + matmul_tn(keys, own), read

    each = queries, keys, attention, written, erased, since_chunk[..., -1]
    state, read = jax.lax.scan(body, state, each, unroll=unroll)
    return _by_token(read, length), state


def _decays(
    log_decay: Float[Array, "N B H C"], since_start: Int[Array, "N B 1 C"]
) -> tuple[Float[Array, "N B H C C"], Float[Array, "N B H C"]]:
    # Returns two arrays of decays. Entry [i, j] of a chunk in the first array is the decay, until
    # token i, of what token j has written. It is 0 if token j comes after token i or belongs to
    # another document. Entry [i] in the second array is the decay, until token i, of the state
    # before the chunk. It is 0 if the document of token i started within the chunk.
    place = jnp.arange(log_decay.shape[-1])[None, None, None]
    distance = place[..., :, None] - place[..., None, :]
    reads = (distance >= 0) & (distance <= since_start[..., None])
    # The sum for a token begins with the chunk, or with the token's document if the document starts
    # within the chunk. If all sums began with the chunk, tokens of the previous document would
    # change the rounding of the decays.
    total = jnp.sum(jnp.where(reads, log_decay[..., None, :], 0), axis=-1)
    within = _exp(total[..., :, None] - total[..., None, :], reads)
    return within, _exp(total, since_start > place)


def _exp(logs: Float[Array, "*B"], where: Bool[Array, "..."]) -> Float[Array, "*B"]:
    return jnp.exp(jnp.where(where, logs, -jnp.inf))


def _by_chunk(x: Array, chunk: int, padding: int) -> Array:
    # [B, T, H] becomes [N, B, H, C], and [B, T, H, K] becomes [N, B, H, C, K].
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)


def _by_token(x: Float[Array, "N B H C V"], length: int) -> Float[Array, "B T H V"]:
    chunks, lanes, heads, chunk, size = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(lanes, chunks * chunk, heads, size)[:, :length]


# The logarithm of the decay of a head is minus the product of a rate, which is a parameter, and a
# step, which depends on the token. In a new layer, rates and steps are random numbers within these
# bounds, as in Mamba-2.
_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)


class DeltaState(NamedTuple):
    """The float32 matrix of every head, and the inputs of the convolution for the last L =
    `CONVOLVED` - 1 tokens. An input is a head's query, key and value, R = 2 K + V channels.
    """

    matrices: Float[Array, "B H K V"]
    inputs: Float[Array, "B L H R"]


def delta_state(model: Model) -> DeltaState:
    heads, key, value = model.of(GatedDeltaNet).sizes(model)
    matrices = state_array((heads, key, value), ("heads", None, None), "float32")
    channels = (CONVOLVED - 1, heads, 2 * key + value)
    return DeltaState(matrices, state_array(channels, (None, "heads", None)))


def delta_flops(model: Model) -> int:
    """Returns the FLOPs per token of a `DeltaMemory`.

    They are the FLOPs of the projections, of the convolution, and of three products with the matrix
    of each head: one that reads the old value of the token's key, one that changes the matrix, and
    one that reads the value of the query. The algorithm in chunks computes further products, which
    are not counted.
    """
    heads, key, value = model.of(GatedDeltaNet).sizes(model)
    projections = 2 * model.model_dim * heads * (2 * key + 3 * value + 2)
    return projections + 2 * CONVOLVED * heads * (2 * key + value) + 6 * heads * key * value


def _rate_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, *_RATES))


def _step_init(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    # The softplus of the bias is a random step.
    low, high = (jnp.log(step) for step in _STEPS)
    return jnp.log(jnp.expm1(jnp.exp(jax.random.uniform(key, shape, dtype, low, high))))


class DeltaMemory(nn.Module):
    """The memory of a Gated DeltaNet layer and its projections. The module takes the place of
    attention, or its output is added to the output of attention.

    The normalized vectors of tokens are projected to queries, keys and values, which are convolved
    along the tokens. By the gated delta rule, each token changes the matrix of each head and reads
    a vector from it. These vectors are normalized, multiplied by a gate, and projected to the width
    of the model. With `zero_output`, a new memory outputs zeros.
    """

    model: Model
    zero_output: bool = False

    def setup(self) -> None:
        m = self.model
        heads, key, value = m.of(GatedDeltaNet).sizes(m)
        for name, size in (("queries", key), ("keys", key), ("values", value), ("gate", value)):
            setattr(self, name, parameter(self, name, (m.model_dim, heads, size), INTO_HEADS))
        self.convolution = parameter(
            self, "convolution", (CONVOLVED, heads, 2 * key + value),
            ("stack", "heads", "head_dim"), nn.initializers.normal(CONVOLVED**-0.5),
        )  # fmt: skip
        for name in ("strength", "step"):
            setattr(self, name, parameter(self, name, (m.model_dim, heads), INTO_HEADS[:2]))
        self.step_bias = parameter(self, "step_bias", (heads,), ("heads",), _step_init)
        self.rate = parameter(self, "rate", (heads,), ("heads",), _rate_init)
        self.read_norm = norm_parameters(self, m, "read_norm", (value,), ("head_dim",))
        init = ZEROS if self.zero_output else kernel_init(inputs=2)
        shape = (heads, value, m.model_dim)
        self.output = parameter(self, "output", shape, FROM_HEADS[1:], init)

    def __call__(
        self, h: Float[Array, "B T D"], state: DeltaState, since_start: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Returns the output for normalized vectors h, and the state after the segment.
        `since_start` is the result of `tokens_since_start`.
        """
        convolved, last = convolution(self._inputs(h), state.inputs, self.convolution, since_start)
        chunk = dispatch.for_backend(64, cpu=16)
        unroll = unrolled(self.model.unroll, -(-h.shape[1] // chunk), BLOCKS_AT_ONCE)
        inputs = self._delta_inputs(h, convolved)
        read, matrices = delta_rule(inputs, state.matrices, since_start, chunk=chunk, unroll=unroll)
        return self._output(h, read), DeltaState(matrices, last)

    def read_token(
        self, h: Float[Array, "B 1 D"], state: DeltaState
    ) -> tuple[Float[Array, "B 1 D"], DeltaState]:
        convolved, last = convolution_step(self._inputs(h), state.inputs, self.convolution)
        read, matrices = delta_step(self._delta_inputs(h, convolved), state.matrices)
        return self._output(h, read), DeltaState(matrices, last)

    def _inputs(self, h: Float[Array, "B T D"]) -> Float[Array, "B T H R"]:
        kernels = self.queries, self.keys, self.values
        parts = (constrain(dense(h, kernel), "lanes", None, "heads", None) for kernel in kernels)
        return jnp.concatenate([*parts], axis=-1)

    def _delta_inputs(
        self, h: Float[Array, "B T D"], convolved: Float[Array, "B T H R"]
    ) -> DeltaInputs:
        heads, key, _ = self.model.of(GatedDeltaNet).sizes(self.model)
        queries, keys, values = jnp.split(jax.nn.silu(convolved), (key, 2 * key), axis=-1)
        step = dense(h, self.step).astype(jnp.float32) + self.step_bias[None, None]
        return DeltaInputs(
            scaled_unit(queries, jnp.full((heads,), key**-0.5)),
            l2_normalize(keys),
            values,
            -jnp.exp(self.rate)[None, None] * jax.nn.softplus(step),
            jax.nn.sigmoid(dense(h, self.strength).astype(jnp.float32)),
        )

    def _output(
        self, h: Float[Array, "B T D"], read: Float[Array, "B T H V"]
    ) -> Float[Array, "B T D"]:
        read = normed(self.model, read, self.read_norm).astype(h.dtype)
        return dense(read * jax.nn.silu(dense(h, self.gate)), self.output, inputs=2)


class GatedDeltaNetLayer(TokenStateLayer):
    """A layer that consists of a norm, a `DeltaMemory` (in place of attention) and an MLP."""

    def setup(self) -> None:
        self.norm = norm_parameters(self, self.model, "norm")
        self.memory = DeltaMemory(self.model)
        self.mlp = MLP(self.model, self.training)
        nn.share_scope(self, self.mlp)  # The MLP's parameters become parameters of this module.

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        since_start = tokens_since_start(given.document_start, x.shape[1])
        read, state = self.memory(self._normed(x), given.state, since_start)
        return LayerOutput(self._finish(x, read), state)

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        read, block = self.memory.read_token(self._normed(x), given.block)
        return LayerOutput(self._finish(x, read), block)


class WindowDeltaState(NamedTuple):
    """The cache, and the fields of the memory's `DeltaState`."""

    window: WindowState | LocalState
    matrices: Float[Array, "B H K V"]
    inputs: Float[Array, "B L H R"]

    @property
    def memory(self) -> DeltaState:
        return DeltaState(*self[1:])


class WindowGatedDeltaNetLayer(WindowLayer):
    """A sliding-window layer with a `DeltaMemory` in addition to its window. The output of the
    memory is added to the output of attention.

    The layer has all parameters of a sliding-window layer, under the same names. A new memory
    outputs zeros, so a layer that starts from the weights of a sliding-window layer computes the
    same as that layer until training changes the memory.
    """

    def setup(self) -> None:
        super().setup()
        self.memory = DeltaMemory(self.model, zero_output=True)

    def __call__(self, x: Float[Array, "B T D"], given: Given) -> LayerOutput:
        """Adds the memory's output to the residual; attention and MLP follow as in other layers."""
        since_start = tokens_since_start(given.document_start, x.shape[1])
        read, memory = self.memory(self.tokens.normed(x), given.state.memory, since_start)
        projections = self.tokens.project(x)
        past, window = with_cache(self.model, given, projections)
        x = projections.residual + dropout(self, read, self.model.dropout)
        y = self.tokens.attend(projections, past, given.feedback, residual=x)
        return LayerOutput(y, WindowDeltaState(window, *memory))

    def begin_block(self, x: None, given: Given) -> LayerOutput:
        return LayerOutput(x, open_block(given, given.state.memory))

    def decode_step(self, x: Float[Array, "B 1 D"], given: Given) -> LayerOutput:
        read, memory = self.memory.read_token(self.tokens.normed(x), given.block.memory)
        residual, projections = dropout(self, read, self.model.dropout), self.tokens.project(x)
        y, block = self.tokens.attend_step(x + residual, given, projections=projections)
        return LayerOutput(y, block._replace(memory=memory))

    def end_block(self, x: None, given: Given) -> LayerOutput:
        window = closed_window(self.model, given)
        return LayerOutput(x, WindowDeltaState(window, *given.block.memory))


register_kind(
    _ALONE,
    LayerKind(
        GatedDeltaNetLayer, delta_state, {"state": ("matrices", "inputs")},
        lambda model: delta_flops(model) + mlp_flops(model), GatedDeltaNet, loops=True,
    ),
)  # fmt: skip
register_kind(
    _BESIDE,
    LayerKind(
        WindowGatedDeltaNetLayer,
        lambda model: WindowDeltaState(window_state(model), *delta_state(model)),
        {"cache": ("window",), "state": ("matrices", "inputs")},
        lambda model: delta_flops(model) + window_flops(model), GatedDeltaNet, loops=True,
    ),
)  # fmt: skip
