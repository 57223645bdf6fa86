"""Causal clustered attention for decoders, with a memory of constant size.

Clustered attention assigns queries to clusters, whose centroids attend in place of the queries. The
clusters of the paper (Fast Transformers with Clustered Attention, section 3) and their centroids
depend on the complete sequence, so a mask would not make that attention causal. Here a token
attends to four parts, which are merged by their log-sum-exps to one softmax over all earlier
tokens:

  window: the W keys that a sliding-window layer reads, exactly.
  nearby: keys of the previous block that have left the window, exactly.
  best: of all keys before the previous block, the R keys with the largest logits for the token's
    centroid, exactly.
  rest: the other keys before the previous block. The centroid attends to them in place of the
    token, and their logits are corrected by the second term of Jensen's gap: the mean of exp(q.k)
    over queries q around a centroid c with variance var is about exp(c.k + var |k|^2 / 2).

The best keys of each centroid, and one vector for the centroid's attention to the rest, are the
memory. Centroids are parameters. The loss trains them through the keys that they keep and
summarize. If centroids were means of earlier queries, they would move from block to block; a
summary for a centroid that has moved must be computed again from all keys, which would have to be
kept. With fixed centroids the memory has C (R + 1) vectors per head for any length, and each key is
processed once. A query chooses its centroid by itself, so a token depends on no later token.

In shapes, B is the number of rows of the batch, H of heads, and K of numbers of a head. A segment
has T tokens in N blocks of W tokens, and Z = T + W counts the keys of the cached block and of the
segment. C is the number of centroids of a head, and R the number of keys that each keeps.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.causal_clustered_attention import pallas_gpu, pallas_tpu, reference, xla
from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    empty_memory_unless,
)
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
            pallas_tpu.refusal,
        ),
        Implementation(
            "pallas_gpu",
            pallas_gpu.causal_clustered_attention,
            ("gpu",),
            ("gpu",),
            pallas_gpu.refusal,
        ),
        Implementation("xla", xla.causal_clustered_attention),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("pallas_gpu_interpret", pallas_gpu.interpreted, auto=()),
        Implementation("reference", reference.causal_clustered_attention, auto=()),
    ),
)
MEMORY_SCAN = Op(
    OP.name,
    (
        Implementation("xla", xla.memory_scan),
        # There are no Pallas kernels for the update of the memory. If a caller selects an
        # implementation by the name of a kernel, plain XLA updates the memory.
        Implementation("pallas_tpu", xla.memory_scan, (), ("tpu",)),
        Implementation("pallas_gpu", xla.memory_scan, (), ("gpu",)),
        Implementation("pallas_interpret", xla.memory_scan, auto=()),
        Implementation("pallas_gpu_interpret", xla.memory_scan, auto=()),
        Implementation("reference", reference.memory_scan, auto=()),
    ),
)


def memory_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
    *,
    implementation: str | None = None,
) -> tuple[CentroidMemory, CentroidMemory]:
    """Updates the memory of the centroids block by block, for all blocks of a segment.

    The memory of a block has the keys and values that each centroid keeps or summarizes of the
    blocks before the previous one (`CentroidMemory`).

    Args:
      keys, values: keys and values of the cached block (the last block before the segment),
        followed by the keys and values of the segment; without rotary embedding.
      cache_mask: True where block n may read the block before it. Where False, a new document
        begins, and the memory is emptied.
      past: the memory that the first block of the segment reads.
      centroids: the centroids of the layer.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The memory that the block after the segment reads, and the memories that the segment's blocks
        read, stacked on a first axis N.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(MEMORY_SCAN, implementation, keys, values, cache_mask, past, centroids)


def causal_clustered_attention(
    queries: Float[Array, "B T H K"],
    window: AttentionPart,
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    pasts: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool = True,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """Returns the attention output of every token over all earlier tokens, in the dtype of
    `values`.

    Args:
      queries: already multiplied by any scale; without rotary embedding.
      window: the result of attention to each token's window: the output [B, T, H, K] and its
        log-sum-exp [B, T, H].
      keys, values, cache_mask: as for `memory_scan`.
      pasts: the memories that the N blocks read, from `memory_scan`.
      centroids: the centroids of the layer.
      bias: float32, a number for each head, added to the logits of all keys outside the window.
      attend_to_self: True if a token's window ends with the token itself; False if the window ends
        with the token before.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
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
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """Returns the attention output of a single token over all earlier tokens, for decoding.

    Args:
      queries: the query of the token, already multiplied by any scale; without rotary embedding.
      window: the result of attention to the token's window: the output [B, 1, H, K] and its
        log-sum-exp [B, 1, H].
      keys, values: keys and values of the complete block before the token's block.
      cache_mask: True if the token may read the previous block and the memory.
      position: the index of the token in its block.
      past: the memory that the token's block reads.
      centroids, bias, attend_to_self: as for `causal_clustered_attention`.
    """
    left = jnp.arange(keys.shape[1]) < position + (1 if attend_to_self else 0)
    mask = (left[None] & cache_mask[:, None])[:, None]
    part = AttentionPart(*(x.swapaxes(1, 2) for x in window))
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys, values))
    y = xla.attend_block(
        q, part, k, v, mask, empty_memory_unless(past, cache_mask), centroids, bias
    )
    return y.swapaxes(1, 2)
