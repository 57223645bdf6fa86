"""Layers whose memory is a matrix for each head, which every token changes by a gated delta rule
(Gated DeltaNet, Yang, Kautz, Hatamizadeh 2024).

The kind "gated_delta_net" has this memory in place of attention, and the kind
"window_gated_delta_net" has it in addition to attention to a window.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.config import Kernels, Model
from brt.config.checks import check, check_not_negative
from brt.config.fields import adaptable, inherited
from brt.config.kinds import KindSection
from brt.distributed.rules import constrain
from brt.layers.attention import TransformerBlock
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    FROM_HEADS,
    INTO_HEADS,
    ZEROS,
    dropout,
    kernel_init,
    norm_parameter,
    normed,
    parameter,
    unrolled,
)
from brt.layers.cache import closed_window, with_cache
from brt.layers.flops import mlp_flops, window_flops
from brt.layers.kinds import LayerKind, register_kind
from brt.layers.mlp import MLP
from brt.layers.state import (
    LayerOutput,
    LocalState,
    OpenBlock,
    WindowState,
    new_window_state,
    open_block,
    window_axes,
)
from brt.memories.gated_delta_rule import DeltaInputs, delta_rule, delta_step
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
from brt.ops.recurrent_attention import StateKV

# Settings of Gated DeltaNet layers.


_ALONE, _BESIDE = "gated_delta_net", "window_gated_delta_net"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(KindSection):
    """Settings of layers with a gated delta rule (Yang, Kautz, Hatamizadeh 2024), whose memory is a
    matrix for each head. The section is for two kinds of layers.
    """

    kind: ClassVar[str] = _ALONE
    any_window: ClassVar[bool] = True
    grouped_keys: ClassVar[bool] = True

    # The layers with these indices have a memory in place of attention.
    layers: tuple[int, ...] = adaptable(())
    # The layers with these indices have a memory in addition to attention to a window. A new memory
    # outputs zeros, so that these layers begin as sliding-window layers.
    window_layers: tuple[int, ...] = adaptable(())
    heads: int = inherited(0)  # Number of matrices of a layer; 0 takes Model.heads.
    key_dim: int = inherited(0)  # Number of rows of a matrix; 0 takes Model.head_dim.
    value_dim: int = inherited(0)  # Number of columns of a matrix; 0 takes Model.head_dim.

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "heads", "key_dim", "value_dim")

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
        check(
            not self.layers or not model.feedback,
            "Model.feedback = True lets every layer attend to recurrent states, which "
            f"GatedDeltaNet.layers = {self.layers} cannot; set it to False",
        )


# The memory of a Gated DeltaNet layer: tokens write to a matrix for each head, and read from it.
#
# In shapes, K and V are the numbers of channels of a key and a value, R = 2 K + V of channels of a
# head that are convolved, and L of earlier tokens that the convolution reads. The other letters of
# shapes are those of `brt.layers.state`.


# The logarithm of the decay of a head is minus the product of a rate, which is a parameter, and a
# step, which depends on the token. In a new layer, rates and steps are random numbers within these
# bounds, as in Mamba-2.
_RATES, _STEPS = (1.0, 16.0), (1e-3, 0.1)


class DeltaState(NamedTuple):
    """The float32 matrix of every head, and the last L = `CONVOLVED` - 1 convolution inputs."""

    matrices: Float[Array, "B H K V"]
    inputs: Float[Array, "B L H R"]


def new_delta_state(model: Model, batch: int, dtype: jnp.dtype) -> DeltaState:
    heads, key, value = model.of(GatedDeltaNet).sizes(model)
    return DeltaState(
        jnp.zeros((batch, heads, key, value), jnp.float32),
        jnp.zeros((batch, CONVOLVED - 1, heads, 2 * key + value), dtype),
    )


def delta_axes(model: Model) -> DeltaState:
    axes: Any = ("lanes", "heads", None, None), ("lanes", None, "heads", None)
    return DeltaState(*axes)


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
        self.read_norm = norm_parameter(self, m, "read_norm", value, "head_dim")
        init = ZEROS if self.zero_output else kernel_init(inputs=2)
        shape = (heads, value, m.model_dim)
        self.output = parameter(self, "output", shape, FROM_HEADS[1:], init)

    def __call__(
        self, h: Float[Array, "B T D"], state: DeltaState, since_start: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Reads the normalized vectors h; `since_start` is the result of `tokens_since_start`."""
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


# Layers with the memory of Gated DeltaNet, in place of attention or in addition to attention.
#
# The memory of a head is a matrix, which every token changes and then reads. The
# letters of shapes are those of `brt.layers.state`.


def gated_delta_net_flops(model: Model) -> int:
    return delta_flops(model) + mlp_flops(model)


class GatedDeltaNetLayer(TokenStateLayer):
    """A layer that consists of a norm, a `DeltaMemory` (in place of attention) and an MLP."""

    def setup(self) -> None:
        self.norm = norm_parameter(self, self.model, "norm")
        self.memory = DeltaMemory(self.model)
        self.mlp = MLP(self.model, self.training)
        nn.share_scope(self, self.mlp)  # The MLP's parameters become parameters of this module.

    def __call__(
        self, x: Float[Array, "B T D"], *, state: DeltaState, document_start: Bool[Array, "B N"],
        **_: Any,
    ) -> LayerOutput:  # fmt: skip
        since_start = tokens_since_start(document_start, x.shape[1])
        read, state = self.memory(self._normed(x), state, since_start)
        return LayerOutput(self._finish(x, read), state)

    def decode_step(self, x: Float[Array, "B 1 D"], *, block: DeltaState, **_: Any) -> LayerOutput:
        read, block = self.memory.read_token(self._normed(x), block)
        return LayerOutput(self._finish(x, read), block)

    def _normed(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return dropout(self, normed(self.model, x, self.norm), self.model.dropout)

    def _finish(self, x: Float[Array, "B T D"], read: Float[Array, "B T D"]) -> Array:
        return self.mlp(x + dropout(self, read, self.model.dropout), None)


class WindowDeltaState(NamedTuple):
    """The cache, and the fields of the memory's `DeltaState`."""

    window: WindowState | LocalState
    matrices: Float[Array, "B H K V"]
    inputs: Float[Array, "B L H R"]


class WindowDeltaBlock(NamedTuple):
    """The open block of a window, and the memory after the tokens that have been read so far."""

    window: OpenBlock
    memory: DeltaState


def new_window_delta_state(model: Model, batch: int, dtype: jnp.dtype) -> WindowDeltaState:
    window = new_window_state(model, batch, dtype)
    return WindowDeltaState(window, *new_delta_state(model, batch, dtype))


def window_delta_axes(model: Model) -> WindowDeltaState:
    return WindowDeltaState(window_axes(model), *delta_axes(model))


def window_delta_flops(model: Model) -> int:
    return window_flops(model) + delta_flops(model)


class WindowGatedDeltaNetLayer(nn.Module):
    """A sliding-window layer with a `DeltaMemory` in addition to its window. The output of the
    memory is added to the output of attention.

    The layer has all parameters of a sliding-window layer, under the same names. A new memory
    outputs zeros, so a layer that starts from the weights of a sliding-window layer computes the
    same as that layer until training changes the memory.
    """

    model: Model
    training: bool = False
    kernels: Kernels = Kernels()

    def setup(self) -> None:
        self.tokens = TransformerBlock(
            self.model, cross_attends=self.model.feedback, training=self.training,
            kernels=self.kernels,
        )  # fmt: skip
        self.memory = DeltaMemory(self.model, zero_output=True)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        state: WindowDeltaState,
        document_start: Bool[Array, "B N"],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        """Adds what the memory reads to the residual, so attention and MLP follow as usual."""
        since_start = tokens_since_start(document_start, x.shape[1])
        memory = DeltaState(state.matrices, state.inputs)
        read, memory = self.memory(self.tokens.normed(x), memory, since_start)
        projections = self.tokens.project(x)
        past, window = with_cache(self.model, state.window, projections, document_start)
        x = projections.residual + self._dropped(read)
        y = self.tokens.attend(projections, past, feedback, residual=x)
        return LayerOutput(y, WindowDeltaState(window, *memory))

    def begin_block(self, x: None, *, state: WindowDeltaState, **_: Any) -> LayerOutput:
        memory = DeltaState(state.matrices, state.inputs)
        return LayerOutput(x, WindowDeltaBlock(open_block(state.window), memory))

    def prepare_block(
        self, x: None, *, block: WindowDeltaBlock, position: Int[Array, ""], **_: Any
    ) -> LayerOutput:
        return LayerOutput(x, block._replace(window=self.tokens.prepared(block.window, position)))

    def decode_step(
        self,
        x: Float[Array, "B 1 D"],
        *,
        state: WindowDeltaState,
        block: WindowDeltaBlock,
        position: Int[Array, ""],
        feedback: StateKV | None = None,
        **_: Any,
    ) -> LayerOutput:
        read, memory = self.memory.read_token(self.tokens.normed(x), block.memory)
        projections = self.tokens.project(x)
        y, window = self.tokens.attend_step(
            x + self._dropped(read), state.window, block.window, position, feedback,
            projections=projections,
        )  # fmt: skip
        return LayerOutput(y, WindowDeltaBlock(window, memory))

    def end_block(
        self, x: None, *, state: WindowDeltaState, block: WindowDeltaBlock, **_: Any
    ) -> LayerOutput:
        window = closed_window(self.model, state.window, block.window)
        return LayerOutput(x, WindowDeltaState(window, *block.memory))

    def _dropped(self, read: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return dropout(self, read, self.model.dropout)


register_kind(
    "gated_delta_net",
    LayerKind(
        GatedDeltaNetLayer,
        new_delta_state,
        delta_axes,
        {"state": ("matrices", "inputs")},
        gated_delta_net_flops,
        GatedDeltaNet,
        loops=True,
    ),
)
register_kind(
    "window_gated_delta_net",
    LayerKind(
        WindowGatedDeltaNetLayer,
        new_window_delta_state,
        window_delta_axes,
        {"cache": ("window",), "state": ("matrices", "inputs")},
        window_delta_flops,
        GatedDeltaNet,
        loops=True,
    ),
)
