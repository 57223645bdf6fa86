"""What clustered attention is compared with.

oracle_top_k  every query's best keys
reformer      locality-sensitive hashing (Kitaev et al. 2020, section 2)

Reformer's keys are the normalised queries. A round sorts tokens by the bucket that random planes
hash them to, and cuts them into chunks; a token sees its chunk and the one before. As in the
clustered attention paper's code, and unlike Kitaev's: nothing is before the first chunk,
buckets only sort (a chunk may span several), and rounds weigh the same. Which tokens share a
chunk depends on the whole sequence, so a causal mask alone does not make it causal.

Letters beside the glossary's: R rounds, P planes of a round (half its buckets), N chunks of
C tokens.
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
    """Softmax attention of every query to its own `count` best keys (section 4.1, "oracle-top").

    Keys that tie with the last of them are kept, so the keys' order does not matter. A row with
    no more than `count` keys in sight is read as by `masked_attention.attend_to_valid`, whose
    other arguments it shares.
    """
    return dispatch.run(
        ORACLE_TOP_K, implementation, queries, keys, values, valid,
        dropout=dropout, count=count, scale=scale, causal=causal,
    )  # fmt: skip


def random_planes(
    key: jax.Array, *, rounds: int, buckets: int, width: int
) -> Float[Array, "R P K"]:
    """Planes through the origin, of every round; all heads and examples share them."""
    return jax.random.normal(key, (rounds, buckets // 2, width))


def bucket_ids(x: Float[Array, "B T H K"], planes: Float[Array, "R P K"]) -> Int[Array, "R B H T"]:
    """int32 in [0, 2P): the plane x is farthest from, P added where it is on the far side."""
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
    """The mean of all rounds; padding comes behind all buckets, so it moves no token.

    See `attend_in_chunks`.
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
    """Attention within chunks of the tokens sorted by bucket, of equal ones by place.

    Args:
      valid: False on padding, which nothing sees. A query that sees nothing gives zeros.
      ids: int32, the bucket of every token; the results of all rounds are averaged.
      dropout: of each round's weights [B, H, N, C, 2C].
      chunk: C; any number of tokens will do.
      scale: of the logits q.k, with k = q / |q|.
      attend_to_self: False: only where a token sees nothing else (Kitaev, section 2).
      causal: later tokens are masked; chunks depend on them all the same.

    Returns:
      In the dtype of `values`; softmax in float32.
    """
    return dispatch.run(
        REFORMER, implementation, queries, values, valid, ids,
        dropout=dropout, chunk=chunk, scale=scale, attend_to_self=attend_to_self, causal=causal,
    )  # fmt: skip
