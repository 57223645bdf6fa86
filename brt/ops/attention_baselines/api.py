"""Attention methods that clustered attention is compared with: oracle top-k and Reformer.

Reformer (Kitaev et al. 2020, section 2) takes the normalized queries as keys. A round of hashing
assigns each token to a bucket by random planes, sorts the tokens by bucket, and splits them into
chunks. A token sees its own chunk and the chunk before. As in the code of Vyas et al. 2020, and
unlike Kitaev's, nothing is before the first chunk, buckets only determine the order (a chunk may
span several), and all rounds have equal weight. Which tokens share a chunk depends on the complete
sequence, so a causal mask alone does not make the attention causal.

In shapes, X is the number of keys, R of rounds, P of planes of a round (half its buckets), and N of
chunks of C tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.attention_baselines import reference, xla
from brt.ops.dispatch import Implementation, Op
from brt.ops.dropout import Dropout

ORACLE_TOP_K = Op(
    "oracle_top_k",
    (
        Implementation("xla", xla.oracle_top_k),
        Implementation(
            "reference", reference.oracle_top_k, auto=(), refusal=dispatch.dropout_refusal
        ),
    ),
)
REFORMER = Op(
    "reformer",
    (
        Implementation("xla", xla.attend_in_chunks),
        Implementation(
            "reference", reference.attend_in_chunks, auto=(), refusal=dispatch.dropout_refusal
        ),
    ),
)


def oracle_top_k(
    queries: Float[Array, "B T H K"],
    keys: Float[Array, "B X H K"],
    values: Float[Array, "B X H K"],
    valid: Bool[Array, "B X"],
    dropout: Dropout | None = None,
    *,
    count: int,
    scale: float,
    causal: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention of every query to the `count` keys with its largest logits.

    This is "oracle-top" of Vyas et al. 2020, section 4.1. Ties with the last of these keys are
    included, so the order of the keys does not matter. A query that sees no key gets zeros.

    Args:
      queries: not yet multiplied by `scale`, the factor of the logits.
      valid: False for padding, which no query sees.
      causal: True hides the keys of later tokens.
    """
    return dispatch.run(
        ORACLE_TOP_K, implementation, queries, keys, values, valid,
        dropout=dropout, count=count, scale=scale, causal=causal,
    )  # fmt: skip


def random_planes(
    key: jax.Array, *, rounds: int, buckets: int, width: int
) -> Float[Array, "R P K"]:
    """Returns normal vectors of random planes through the origin, shared by all heads."""
    return jax.random.normal(key, (rounds, buckets // 2, width))


def bucket_ids(x: Float[Array, "B T H K"], planes: Float[Array, "R P K"]) -> Int[Array, "R B H T"]:
    """Returns the bucket of each vector in each round, int32 in [0, 2P).

    The bucket is the index of the plane whose normal vector has the dot product of largest
    magnitude with the vector, plus P if this dot product is negative.
    """
    projected = jnp.einsum(
        "bthk,rpk->rbhtp", x.astype(jnp.float32), planes, precision=jax.lax.Precision.HIGHEST
    )
    both = jnp.concatenate([projected, -projected], axis=-1)
    return jnp.argmax(both, axis=-1).astype(jnp.int32)


def reformer(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    planes: Float[Array, "R P K"],
    dropout: Dropout | None = None,
    *,
    chunk: int,
    scale: float,
    attend_to_self: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns Reformer's attention, with the buckets of `bucket_ids`; see `attend_in_chunks`.

    Padding gets a bucket after all others, so it does not change which tokens share a chunk.
    """
    ids = bucket_ids(jax.lax.stop_gradient(queries), planes)
    ids = jnp.where(valid[None, :, None], ids, 2 * planes.shape[1])
    return attend_in_chunks(
        queries, values, valid, ids, dropout,
        chunk=chunk, scale=scale, attend_to_self=attend_to_self,
        implementation=implementation,
    )  # fmt: skip


def attend_in_chunks(
    queries: Float[Array, "B T H K"],
    values: Float[Array, "B T H K"],
    valid: Bool[Array, "B T"],
    ids: Int[Array, "R B H T"],
    dropout: Dropout | None = None,
    *,
    chunk: int,
    scale: float,
    attend_to_self: bool = True,
    causal: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns Reformer's attention, averaged over the rounds, for the known buckets `ids`.

    Tokens of one bucket stay in the order of their positions. A query that sees no key gets zeros.

    Args:
      queries: not yet multiplied by `scale`, the factor of the logits; also the keys after
        normalization.
      valid: False for padding, which no query sees.
      dropout: of each round's attention weights [B, H, N, C, 2C].
      chunk: C; T need not be a multiple of C.
      attend_to_self: False lets a token see itself only if it sees nothing else (Kitaev, section
        2).
      causal: True hides later tokens from a token. The sorting still depends on later tokens.
    """
    return dispatch.run(
        REFORMER, implementation, queries, values, valid, ids,
        dropout=dropout, chunk=chunk, scale=scale, attend_to_self=attend_to_self, causal=causal,
    )  # fmt: skip
