"""Clustered attention that looks only back: a decoder's, with a past of constant size.

The clusters of the paper (Fast Transformers with Clustered Attention, section 3) are those of
a whole sequence, and so are its centroids and their best keys: masking its attention leaves it
looking ahead. Here a token reads four parts, merged by the logarithms of their sums, as one
softmax over all of its past:

  window   the W keys that a sliding-window layer reads, exactly
  nearby   keys of the block before, once they have left the window, exactly
  best     of all blocks before that, the R keys that the token's centroid fits best, exactly
  rest     the others, with the centroid in the token's place, plus the second term of Jensen's
           gap: the mean of exp(q.k) over queries around c is about exp(c.k + var |k|^2 / 2)

Centroids are parameters, which the loss trains through what they choose to keep and sum up.
Means of earlier queries would move from block to block, and what was summed up for a centroid
that moved has to be summed up again, for which every key must be kept. With fixed ones a past
takes C (R + 1) vectors a head whatever its length, and each key is looked at once. A query
finds its centroid by itself, so what a token reads depends on no later token.

Letters beside the glossary's: C centroids of a head, R keys that each keeps, Q queries.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.causal_clustered_attention import pallas_tpu, reference, xla
from brt.ops.causal_clustered_attention.past import Centroids, Past, kept
from brt.ops.dispatch import Implementation, Op
from brt.ops.partial_attention import AttentionPart

OP = Op(
    "causal_clustered_attention",
    (
        Implementation(
            "pallas_tpu",
            pallas_tpu.causal_clustered_attention,
            ("tpu",),
            ("tpu",),
            pallas_tpu.refuses,
        ),
        Implementation("xla", xla.causal_clustered_attention),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("reference", reference.causal_clustered_attention, auto=()),
    ),
)
PAST_SCAN = Op(
    OP.name,
    (
        Implementation("xla", xla.past_scan),
        # What the kernel of the attention reads, it leaves to plain XLA.
        Implementation("pallas_tpu", xla.past_scan, (), ("tpu",)),
        Implementation("pallas_interpret", xla.past_scan, auto=()),
        Implementation("reference", reference.past_scan, auto=()),
    ),
)


def past_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: Past,
    centroids: Centroids,
    *,
    implementation: str | None = None,
) -> tuple[Past, Past]:
    """Runs `past_after` over the blocks of a segment.

    Args:
      keys, values: those of the cached block, then those of the segment; not rotated.
      cache_mask: whether block n may read the block before it; where not, its document has no
        past.
      past: of the first block.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      The past of the block after the segment, and those of its blocks, with a first axis N.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(PAST_SCAN, implementation, keys, values, cache_mask, past, centroids)


def causal_clustered_attention(
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: Past,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """What every token reads.

    Args:
      queries: with any scale folded in; not rotated.
      window: what `window_part` gave, [B, T, H, K] and [B, T, H].
      keys, values, cache_mask: as of `past_scan`.
      pasts: of every block, from `past_scan`.
      bias: float32, added to the logits of all keys that have left the window.
      attend_to_self: whether the nearest key of a window is the token itself.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      In the dtype of `values`; softmax in float32.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        OP, implementation, queries, window, keys, values, cache_mask, pasts, centroids, bias,
        attend_to_self=attend_to_self,
    )  # fmt: skip


def causal_clustered_attention_step(
    queries: Float[Array, "B 1 H K"],
    window: AttentionPart,
    keys: Float[Array, "B W H K"],
    values: Float[Array, "B W H K"],
    cache_mask: Bool[Array, " B"],
    position: Int[Array, ""],
    past: Past,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """Row `position` of a block: the same for one token.

    Args:
      window: [B, 1, H, K] and [B, 1, H].
      keys, values: of the block before, whole.
    """
    left = jnp.arange(keys.shape[1]) < position + (1 if attend_to_self else 0)
    mask = (left[None] & cache_mask[:, None])[:, None]
    part = AttentionPart(*(x.swapaxes(1, 2) for x in window))
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys, values))
    y = xla.read(q, part, k, v, mask, kept(past, cache_mask), centroids, bias)
    return y.swapaxes(1, 2)
