"""The memory of a Gated DeltaNet layer: tokens write to a matrix for each head, and read from it.

In shapes, K and V are the numbers of channels of a key and a value, R = 2 K + V of channels of a
head that are convolved, and L of earlier tokens that the convolution reads. The other letters of
shapes are those of `brt.layers.state`.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brt.config import Model
from brt.distributed.rules import constrain
from brt.layers.basic import (
    BLOCKS_AT_ONCE,
    FROM_HEADS,
    INTO_HEADS,
    ZEROS,
    kernel_init,
    norm_parameter,
    normed,
    parameter,
    unrolled,
)
from brt.memories.convolution import CONVOLVED, convolution, convolution_step
from brt.memories.gated_delta_net.delta_rule import DeltaInputs, delta_rule, delta_step
from brt.memories.gated_delta_net.section import GatedDeltaNet
from brt.ops import dispatch
from brt.ops.dense import dense
from brt.ops.normalization import l2_normalize, scaled_unit

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
