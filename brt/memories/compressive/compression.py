"""Compression of blocks of tokens, and attention to the window together with compressed blocks
(Compressive Transformers for Long-Range Sequence Modelling, Rae et al. 2020, section 3).

A slot is a vector that stands for R neighbouring tokens of an older block. In shapes, S is the
number of slots of a block of W tokens, and Q the number of queries of a block. The other letters of
shapes are those of `brt.layers.state`.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops.dense import dense
from brt.ops.partial_attention import AttentionPart, attend_to_part, merge_parts
from brt.ops.products import matmul_nt
from brt.ops.reductions import add_shared
from brt.ops.softmax import MASKED


class Convolution(NamedTuple):
    """Weights of a convolution whose stride equals its width. The kernel is [R, D, E] if it
    compresses R tokens to a slot, and [D, R, E] if it restores R tokens from a slot.
    """

    kernel: Float[Array, "R D E"]
    bias: Float[Array, " E"]


def compress(
    x: Float[Array, "*B W D"], rate: int, how: Literal["mean", "max"] | Convolution
) -> Float[Array, "*B S D"]:
    """Returns the S = W / `rate` slots of a block, oldest first, in float32, each of `rate`
    neighbouring tokens: their mean, their maximum, or the output of a learned convolution.
    """
    groups = x.reshape(*x.shape[:-2], -1, rate, x.shape[-1])
    if isinstance(how, Convolution):
        return add_shared(dense(groups, how.kernel, 2).astype(jnp.float32), how.bias)
    if how == "max":
        return jnp.max(groups, axis=-2).astype(jnp.float32)
    return jnp.mean(groups, axis=-2, dtype=jnp.float32)


def visible_slot_counts(
    length: Int[Array, " B"], cache_mask: Bool[Array, "B N"], *, added: int, size: int
) -> Int[Array, "B N+1"]:
    """Returns the number of slots that each block can read, for the N blocks of a segment and the
    block after them.

    The block after a block reads its tokens, and all later blocks of the document read the slots.

    Args:
      length: the number of slots that the first block of the segment can read if no document begins
        with this block.
      cache_mask: True if a block may read the block before it; False if a document begins.
      added: the number of slots to which a block is compressed.
      size: the largest number of slots that a block can read.
    """
    blocks = jnp.arange(cache_mask.shape[1] + 1)[None]
    begins = jnp.pad(~cache_mask, ((0, 0), (0, 1)))
    first = jax.lax.cummax(jnp.where(begins, blocks, -1), axis=1)
    since = jnp.maximum(blocks - first - 1, 0) * added
    return jnp.minimum(jnp.where(first < 0, length[:, None] + blocks * added, since), size)


def sliding_windows(x: Float[Array, "B Z *D"], blocks: int, *, step: int, size: int) -> Array:
    """Returns `blocks` overlapping slices of x along axis 1, as an array [B, N, size, *D]. Slice n
    has the `size` entries of x from index n * `step` on.
    """
    return jnp.stack([x[:, n * step : n * step + size] for n in range(blocks)], axis=1)


def attend_window_and_slots(
    queries: Float[Array, "B N Q H K"],
    window: AttentionPart,
    keys: Float[Array, "B N S H K"],
    values: Float[Array, "B N S H K"],
    seen: Bool[Array, "B N Q S"],
    bias: Float[Array, " H"],
) -> Float[Array, "B N Q H K"]:
    """Returns the attention output of every query over its window and over older keys, with one
    softmax. The older keys belong to slots, and to tokens of the previous block that have left the
    window.

    Args:
      queries: the scaled queries of each block.
      window: the result of attention to the window alone.
      seen: True where a query may read an older key.
      bias: a bias of each head, added to the logits of all older keys.
    """
    q, k, v = (x.swapaxes(2, 3) for x in (queries, keys, values))
    logits = matmul_nt(q, k) + bias[None, None, :, None, None]
    beyond = attend_to_part(jnp.where(seen[:, :, None], logits, MASKED), v)
    near = AttentionPart(*(x.swapaxes(2, 3) for x in window))
    return merge_parts([near, beyond]).output.swapaxes(2, 3).astype(values.dtype)


def reconstruction_error(
    x: Float[Array, "*B W D"], slots: Float[Array, "*B S D"], decoder: Convolution
) -> Float[Array, "*B"]:
    """Returns the loss "autoencoding" of a learned compression: the mean squared error of the
    tokens' vectors (which get no gradient) that `decoder` restores from a block's slots.
    """
    decoded = add_shared(dense(slots, decoder.kernel), decoder.bias).astype(jnp.float32)
    errors = decoded.reshape(x.shape) - jax.lax.stop_gradient(x).astype(jnp.float32)
    return jnp.mean(jnp.square(errors), axis=(-2, -1))


def attention_reconstruction_error(
    queries: Float[Array, "B N Q H K"],
    exact: tuple[Float[Array, "B N W H K"], Float[Array, "B N W H K"]],
    slots: tuple[Float[Array, "B N S H K"], Float[Array, "B N S H K"]],
) -> Float[Array, "B N"]:
    """Returns the loss "attention" of a learned compression: the mean squared difference between
    attention to a block's tokens (`exact`) and attention to its slots.

    Logits are products of queries and keys without a bias. Only `slots` receives a gradient.
    """
    queries, exact = jax.lax.stop_gradient((queries, exact))

    def attend(keys: Array, values: Array) -> Array:
        q, k, v = (x.swapaxes(2, 3) for x in (queries, keys, values))
        return attend_to_part(matmul_nt(q, k), v).output

    return jnp.mean(jnp.square(attend(*slots) - attend(*exact)), axis=(2, 3, 4))
