"""Kinds of cross-attention that the paper compares `srformer` with.

A target position attends to a segment of the source and to additional keys and values:

  xl_memory: the outputs of an RNN, which runs over the source, for the previous segment (the
    original code).
  transformer_xl: the previous segment itself, without a gradient, as Transformer-XL does.
  local_global: the mean of every segment's keys and values (the original code's LongT5).

In shapes, B is the number of sources, X of source positions, M of segments, S of positions of a
segment, H of heads, and K of numbers of a head; A = H * K.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.ops import deferred
from brt.ops.dense import dense
from brt.ops.segmented_recurrent_attention import SharedKeys


class RnnWeights(NamedTuple):
    """Weights of the recurrence h_z = tanh(x_z input_kernel + h_{z-1} kernel + bias).

    x_z is the vector of position z, h_z is the state at position z, and A = H * K.
    """

    input_kernel: Float[Array, "A A"]
    kernel: Float[Array, "A A"]
    bias: Float[Array, " A"]


def rnn(x: Float[Array, "B X H K"], weights: RnnWeights) -> Float[Array, "B X H K"]:
    """Returns the state of a recurrent neural network (RNN) at every position of the source.

    The RNN reads the vectors of all heads of a position as one vector of A numbers. The state
    before the first position is zero.

    Args:
      x: the keys or the values of the source.
      weights: the weights of the recurrence.
    """
    batch, length, heads, width = x.shape
    inputs = dense(x.reshape(batch, length, heads * width), weights.input_kernel)
    inputs = inputs + weights.bias.astype(x.dtype)[None, None]
    taps = deferred.tap((weights.kernel,), (length, batch), x.dtype)

    def recurrence(
        h: Float[Array, "B A"], xs: tuple[Float[Array, "B A"], deferred.Tap]
    ) -> tuple[Float[Array, "B A"], Float[Array, "B A"]]:
        """Returns the state at a position twice: as the scan's carry and as the position's output.

        Args:
          h: the state at the previous position.
          xs: the position's input; and the `Tap` by which the gradient of the kernel is computed
            once after the backward scan, instead of at each position.
        """
        h = jnp.tanh(xs[0] + deferred.dot(h, weights.kernel, xs[1]))
        return h, h

    _, states = jax.lax.scan(
        recurrence, jnp.zeros_like(inputs[:, 0]), (inputs.swapaxes(0, 1), taps)
    )
    return states.swapaxes(0, 1).reshape(x.shape)


def with_previous(
    segments: Float[Array, "M B H S K"], memory: Float[Array, "M B H S K"] | None
) -> Float[Array, "M B H Y K"]:
    """Returns the keys or values of each segment, preceded by the memory of the previous segment.

    The memory of a segment has a vector for each of its S positions, so the result has Y = 2S
    positions for each segment.

    Args:
      segments: the keys or values of each segment.
      memory: the memory of each segment, such as the outputs of an RNN. The first segment has no
        previous segment; its own memory precedes it, as in the original code. If `memory` is None,
        the memory of a segment is the segment itself, without a gradient; zeros then precede the
        first segment, and `previous_mask` masks these zeros.
    """
    if memory is None:
        memory = jax.lax.stop_gradient(segments)
        first = jnp.zeros_like(memory[:1])
    else:
        first = memory[:1]
    return jnp.concatenate([jnp.concatenate([first, memory[:-1]]), segments], axis=3)


def previous_mask(mask: Bool[Array, "M B S"], *, first: bool) -> Bool[Array, "M B Y"]:
    """Returns the mask of the Y = 2S keys of each segment in the result of `with_previous`: True
    for keys that may be read.

    Args:
      mask: True for positions of each segment that are not padding.
      first: True if the first segment may read the memory that `with_previous` puts before it.
    """
    front = mask[:1] & first
    return jnp.concatenate([jnp.concatenate([front, mask[:-1]]), mask], axis=2)


def segment_means(
    keys: Float[Array, "M B H S K"],
    values: Float[Array, "M B H S K"],
    counted: Bool[Array, "M B S"],
) -> SharedKeys:
    """Returns the mean key and the mean value of every segment, as a `SharedKeys`: additional keys
    and values that the targets of all segments read.

    Args:
      keys, values: the keys and values of each segment.
      counted: True for positions over which the means are taken. Segments without such positions
        are masked in the result.
    """
    numbers = jnp.maximum(jnp.sum(counted, axis=2), 1)

    def mean(x: Float[Array, "M B H S K"]) -> Float[Array, "B H M K"]:
        """Returns the mean of the keys or values x over the counted positions of each segment."""
        sums = jnp.einsum("mbs,mbhsk->mbhk", counted.astype(x.dtype), x)
        return jnp.moveaxis(sums / numbers[:, :, None, None].astype(x.dtype), 0, 2)

    return SharedKeys(mean(keys), mean(values), jnp.any(counted, axis=2).T)
