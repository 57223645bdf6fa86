"""A block in fewer vectors, and attention to what lies beyond the window (Compressive Transformers
for Long-Range Sequence Modelling, Rae et al. 2020, section 3).

Letters beside the glossary's: R tokens that become one slot, C slots that a block reads.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dense import dense
from brt.ops.partial_attention import AttentionPart, attend_to_part, merged
from brt.ops.products import inner
from brt.ops.reductions import add_shared
from brt.ops.softmax import MASKED


class Convolution(NamedTuple):
    """A compressor that learns.

    Attributes:
      kernel: [R, D, D], its stride is its length.
      bias: [D].
    """

    kernel: Float[Array, "R D E"]
    bias: Float[Array, " E"]


def compress(
    x: Float[Array, "*B W D"], rate: int, how: Literal["mean", "max"] | Convolution
) -> Float[Array, "*B S D"]:
    """S = W / rate slots, oldest first, each of `rate` neighbours; float32."""
    groups = x.reshape(*x.shape[:-2], -1, rate, x.shape[-1])
    if isinstance(how, Convolution):
        return add_shared(dense(groups, how.kernel, 2).astype(jnp.float32), how.bias)
    if how == "max":
        return jnp.max(groups, axis=-2).astype(jnp.float32)
    return jnp.mean(groups, axis=-2, dtype=jnp.float32)


def slots_before(
    length: Int[Array, " B"], cache_mask: Bool[Array, "B N"], *, added: int, size: int
) -> Int[Array, "B N+1"]:
    """How many slots of its document each block finds, and the block after these.

    A block becomes `added` slots two blocks later; `length` is what the first block finds if it may
    read the block before it. There are `size` slots at most.
    """
    blocks = jnp.arange(cache_mask.shape[1] + 1)[None]
    begins = jnp.pad(~cache_mask, ((0, 0), (0, 1)))
    first = jax.lax.cummax(jnp.where(begins, blocks, -1), axis=1)
    since = jnp.maximum(blocks - first - 1, 0) * added
    return jnp.minimum(jnp.where(first < 0, length[:, None] + blocks * added, since), size)


def windows(x: Float[Array, "B Z *D"], blocks: int, *, step: int, size: int) -> Array:
    """[B, N, size, *D]: what block n reads begins at n * step."""
    return jnp.stack([x[:, n * step : n * step + size] for n in range(blocks)], axis=1)


def attend_beyond(
    queries: Float[Array, "B N Q H K"],
    window: AttentionPart,
    keys: Float[Array, "B N S H K"],
    values: Float[Array, "B N S H K"],
    seen: Bool[Array, "B N Q S"],
    bias: Float[Array, " H"],
) -> Float[Array, "B N Q H K"]:
    """One softmax over the window and over keys that have left it, in the dtype of `values`.

    Args:
      window: [B, N, Q, H, K] and [B, N, Q, H].
      bias: added to the logits of all these keys.
    """
    q, k, v = (x.swapaxes(2, 3) for x in (queries, keys, values))
    logits = inner(q, k) + bias[None, None, :, None, None]
    beyond = attend_to_part(jnp.where(seen[:, :, None], logits, MASKED), v)
    near = AttentionPart(*(x.swapaxes(2, 3) for x in window))
    return merged([near, beyond]).output.swapaxes(2, 3).astype(values.dtype)


def restored_error(
    x: Float[Array, "*B W D"], slots: Float[Array, "*B S D"], decoder: Convolution
) -> Float[Array, "*B"]:
    """Mean square of what a transposed convolution makes of slots otherwise than `x`, a constant.

    Args:
      decoder: its kernel is [D, R, D], from a slot to each of its tokens.
    """
    found = add_shared(dense(slots, decoder.kernel), decoder.bias).astype(jnp.float32)
    errors = found.reshape(x.shape) - jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.mean(jnp.square(errors), axis=(-2, -1))


def reconstruction(
    queries: Float[Array, "B N Q H K"],
    exact: tuple[Float[Array, "B N W H K"], Float[Array, "B N W H K"]],
    slots: tuple[Float[Array, "B N S H K"], Float[Array, "B N S H K"]],
) -> Float[Array, "B N"]:
    """Mean square of what attention to the slots of a block reads otherwise than to the block.

    By content alone; `slots` alone have a gradient.
    """
    queries, exact = jax.lax.stop_gradient((queries, exact))

    def read(keys: Array, values: Array) -> Array:
        q, k, v = (x.swapaxes(2, 3) for x in (queries, keys, values))
        return attend_to_part(inner(q, k), v).output

    return jnp.mean(jnp.square(read(*slots) - read(*exact)), axis=(2, 3, 4))
