"""Attention methods that clustered attention is compared with: oracle top-k and Reformer.

With `oracle_top_k`, each query attends only to the keys with its largest logits. `reformer` is
attention with locality-sensitive hashing (Kitaev et al. 2020, section 2).

Reformer's keys are the normalized queries. A round of hashing assigns each token to a bucket by
random planes, sorts the tokens by bucket, and splits the sorted tokens into chunks. A token sees
its own chunk and the chunk before. As in the code of the paper on clustered attention (Vyas et al.
2020), and unlike Kitaev's, nothing is before the first chunk, buckets only determine the order (a
chunk may span several), and all rounds have equal weight. Which tokens share a chunk depends on the
complete sequence, so a causal mask alone does not make the attention causal.

In shapes, B is the number of rows of the batch, T of queries, X of keys, H of heads, K of numbers
of a head, R of rounds, P of planes of a round (half its buckets), and N of chunks of C tokens.
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
    """Returns the attention output of every query over the `count` keys with the query's largest
    logits, in the dtype of `values`.

    This is "oracle-top" in section 4.1 of Vyas et al. 2020. If several keys have the same logit as
    the last of these keys, all of them are included, so the order of the keys does not matter. A
    query that sees at most `count` keys gets the result of ordinary attention.

    Args:
      queries: unscaled queries.
      keys: the keys.
      values: the values.
      valid: False for padding, which no query sees. A query that sees no key gets zeros.
      dropout: dropout of the attention weights [B, H, T, X]; None for no dropout.
      count: the number of keys that a query attends to.
      scale: factor of the logits q.k.
      causal: True hides the keys of later tokens from a query.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
    """
    return dispatch.run(
        ORACLE_TOP_K, implementation, queries, keys, values, valid,
        dropout=dropout, count=count, scale=scale, causal=causal,
    )  # fmt: skip


def random_planes(
    key: jax.Array, *, rounds: int, buckets: int, width: int
) -> Float[Array, "R P K"]:
    """Returns random planes through the origin, as the float32 normal vectors of P planes for each
    round of hashing.

    All heads and examples share the planes, which are passed to `bucket_ids` or `reformer`.

    Args:
      key: the random key from which the planes are drawn.
      rounds: R, the number of rounds.
      buckets: the number of buckets of a round, which has P = `buckets` / 2 planes.
      width: K, the size of the vectors to hash.
    """
    return jax.random.normal(key, (rounds, buckets // 2, width))


def bucket_ids(x: Float[Array, "B T H K"], planes: Float[Array, "R P K"]) -> Int[Array, "R B H T"]:
    """Returns the bucket of each vector in each round, int32 in [0, 2P).

    The bucket is the index of the plane whose normal vector has the dot product of largest
    magnitude with the vector, plus P if this dot product is negative.

    Args:
      x: the vectors, one for each token and head.
      planes: the normal vectors of the planes of each round, from `random_planes`.
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
    """Returns Reformer's attention output, averaged over R rounds of hashing, in the dtype of
    `values`.

    Each round computes the tokens' buckets by `bucket_ids` and attends by `attend_in_chunks`.
    Padding gets a bucket after all others, so it does not change which tokens share a chunk.

    Args:
      queries: unscaled queries, which are also the keys after normalization.
      values: the values.
      valid: False for padding, which no query sees.
      planes: the planes of all rounds, from `random_planes`.
      dropout: dropout of each round's attention weights; None for no dropout.
      chunk: the number of tokens of a chunk.
      scale: factor of the logits q.k, with k = q / |q|.
      attend_to_self: False lets a token see itself only if it sees nothing else.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.
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
    """Returns the output of Reformer's attention for buckets that are already known.

    In each round, the tokens are sorted by bucket and split into chunks. Tokens of one bucket stay
    in the order of their positions. A token sees its own chunk and the chunk before it. The results
    of all rounds are averaged.

    Args:
      queries: unscaled queries, which are also the keys after normalization.
      values: the values.
      valid: False for padding, which no query sees. A query that sees no key gets zeros.
      ids: int32, the bucket of every token in each of R rounds.
      dropout: dropout of each round's attention weights [B, H, N, C, 2C]; None for no dropout.
      chunk: C, the number of tokens of a chunk; T need not be a multiple of C.
      scale: factor of the logits q.k, with k = q / |q|.
      attend_to_self: False lets a token see itself only if it sees nothing else (Kitaev, section
        2).
      causal: True hides later tokens from a token. The sorting still depends on later tokens.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The outputs in the dtype of `values`, with the softmax in float32.
    """
    return dispatch.run(
        REFORMER, implementation, queries, values, valid, ids,
        dropout=dropout, chunk=chunk, scale=scale, attend_to_self=attend_to_self, causal=causal,
    )  # fmt: skip
