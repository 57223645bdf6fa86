"""Kinds of cross-attention with which the paper of SRformer compares `srformer` (see `api`).

`xl_memory` follows the paper's code, and `local_global` follows the LongT5 model in that code. In
`transformer_xl`, the previous segment has no gradient. In shapes, B is the number of sources, X the
number of source positions, M the number of segments, and S the number of positions of a segment.
The width of all heads together is A = H * K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops import deferred
from brt.ops.cross_attention.segments import SharedKeys
from brt.ops.dense import dense


class RnnWeights(NamedTuple):
    """Weights of the recurrence h_z = tanh(x_z input_kernel + h_{z-1} kernel + bias)."""

    input_kernel: Float[Array, "A A"]
    kernel: Float[Array, "A A"]
    bias: Float[Array, " A"]


def rnn(x: Float[Array, "B X H K"], weights: RnnWeights) -> Float[Array, "B X H K"]:
    """Returns the RNN's state at every position; the RNN joins the heads of x to one vector."""
    batch, length, heads, width = x.shape
    inputs = dense(x.reshape(batch, length, heads * width), weights.input_kernel)
    inputs = inputs + weights.bias.astype(x.dtype)[None, None]
    taps = deferred.tap(weights.kernel, (length, batch), x.dtype)

    def recurrence(
        h: Float[Array, "B A"], xs: tuple[Float[Array, "B A"], deferred.Tap]
    ) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
        h = jnp.tanh(xs[0] + deferred.dot(h, weights.kernel, xs[1]))
        return h, h

    _, states = jax.lax.scan(
        recurrence, jnp.zeros_like(inputs[:, 0]), (inputs.swapaxes(0, 1), taps)
    )
    return states.swapaxes(0, 1).reshape(x.shape)


def with_previous(
    segments: Float[Array, "M B H S K"], memory: Float[Array, "M B H S K"] | None
) -> Float[Array, "M B H Y K"]:
    """Puts the memory of the previous segment before the keys or values of each segment.

    A memory has a vector for each position, so Y = 2S. The first segment is preceded by its own
    memory, as in the original code. If `memory` is None, the memory of a segment is the segment
    itself, without a gradient. The first segment is then preceded by zeros, which `previous_mask`
    must mask.
    """
    if memory is None:
        memory = jax.lax.stop_gradient(segments)
        first = jnp.zeros_like(memory[:1])
    else:
        first = memory[:1]
    return jnp.concatenate([jnp.concatenate([first, memory[:-1]]), segments], axis=3)


def previous_mask(mask: Bool[Array, "M B S"], *, first: bool) -> Bool[Array, "M B Y"]:
    """Returns which keys in the result of `with_previous` may be read.

    `first` is True if the first segment may read the memory before it.
    """
    front = mask[:1] & first
    return jnp.concatenate([jnp.concatenate([front, mask[:-1]]), mask], axis=2)


def segment_means(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counted: Bool[Array, "M B S"],
) -> SharedKeys:
    """Returns the means of every segment over its `counted` positions, as shared keys.

    Segments without counted positions are masked in the result.
    """
    numbers = jnp.maximum(jnp.sum(counted, axis=2), 1)

    def mean(x: Float[Array, "M B H S K"]) -> Float[Array, "B H M K"]:
        sums = jnp.einsum("mbs,mbhsk->mbhk", counted.astype(x.dtype), x)
        return jnp.moveaxis(sums / numbers[:, :, None, None].astype(x.dtype), 0, 2)

    return SharedKeys(mean(keys), mean(values), jnp.any(counted, axis=2).T)
