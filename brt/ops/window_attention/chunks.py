"""Window attention in plain XLA by chunks of queries, for windows and documents of any length.

The backward pass computes the weights of a chunk again. In shapes, C is the number of chunks, and Q
the number of queries of a chunk. R = H / G heads of queries share a head of keys. See `api` for the
others.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brt.ops.dropout import Dropout
from brt.ops.partial_attention import AttentionPart
from brt.ops.products import matmul_nt
from brt.ops.softmax import MASKED, soft_capped, softmax_and_lse
from brt.ops.window_attention.inputs import WindowInputs

# A chunk has at most this many queries. For each head of each row of the batch, the logits of a
# chunk are then at most CHUNK x (CHUNK + W) numbers.
CHUNK = 256


def window_attention(
    inputs: WindowInputs, *, attend_to_self: bool, soft_cap: float = 0.0
) -> AttentionPart:
    """Implements `api.local_attention` in chunks; `inputs.dropout` is None or a `Dropout`."""
    queries, keys, values = inputs.joined()
    bias, dropout, length = inputs.bias, inputs.dropout, queries.shape[1]
    window, chunk = inputs.window, min(length, CHUNK)
    count = -(-length // chunk)
    padding = ((0, 0), (0, count * chunk - length), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, padding) for x in (queries, keys, values))
    starts = jnp.pad(inputs.starts(), padding[:2])
    nearest = 0 if attend_to_self else 1
    # `steps` has, for each pair of a query and a key of a chunk, the number of tokens from the key
    # to the nearest key that the query can see. The bias of the pair is in the column of `bias`
    # with this number.
    steps = np.arange(chunk)[:, None] + window - np.arange(chunk + window)[None] - nearest
    in_window = (steps >= 0) & (steps < window)
    tile = None
    if bias is not None:
        tile = jnp.take(bias, np.clip(steps, 0, window - 1), axis=1)

    heads, groups = queries.shape[2], keys.shape[2]

    # The queries of the R heads that share a head of keys are merged into the axis RQ, of length R
    # * Q. X is the number of keys of a chunk if x has weights, and K if x has queries or outputs.
    def by_key_head(x: Float[Array, "B H Q X"]) -> Float[Array, "B G RQ X"]:
        return x.reshape(x.shape[0], groups, -1, x.shape[-1])

    def by_query_head(x: Float[Array, "B G RQ X"]) -> Float[Array, "B H Q X"]:
        return x.reshape(x.shape[0], heads, -1, x.shape[-1])

    @jax.checkpoint
    def attend_chunk(n: Int[Array, ""]) -> AttentionPart:
        rows = (jax.lax.dynamic_slice_in_dim(x, n * chunk, chunk, axis=1) for x in (q, starts))
        columns = (
            jax.lax.dynamic_slice_in_dim(x, n * chunk, chunk + window, axis=1) for x in (k, v)
        )
        (own, begin), (near_keys, near_values) = rows, columns
        places = n * chunk - window + jnp.arange(chunk + window)
        seen = jnp.asarray(in_window)[None] & (places[None, None] >= begin[..., None])
        own, near_keys, near_values = (x.swapaxes(1, 2) for x in (own, near_keys, near_values))
        logits = soft_capped(by_query_head(matmul_nt(by_key_head(own), near_keys)), soft_cap)
        if tile is not None:
            logits += tile[None]
        weights, lse = softmax_and_lse(jnp.where(seen[:, None], logits, MASKED))
        if dropout is not None:
            weights = Dropout(jax.random.fold_in(dropout.rng, n), dropout.rate)(weights)
        output = by_query_head(by_key_head(weights.astype(near_values.dtype)) @ near_values)
        return AttentionPart(output.swapaxes(1, 2), lse.swapaxes(1, 2))

    parts = jax.lax.map(attend_chunk, jnp.arange(count))

    def join_chunks(x: Float[Array, "C B Q ..."]) -> Float[Array, "B T ..."]:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :length]

    return AttentionPart(*map(join_chunks, parts))
