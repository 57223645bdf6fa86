"""Causal clustered attention for decoders, with a memory of constant size.

In non-causal clustered attention (`brt.ops.clustered_attention`), clusters and their centroids
depend on the complete sequence. Here, centroids are parameters, and each query chooses one of them.
One softmax over all earlier tokens is merged from four parts. The token's own query attends to the
keys of the first three parts, so these logits are exact:

  window: the W keys that a sliding-window layer reads.
  nearby: the keys of the previous block that have left the window.
  best: the R keys with the largest logits for the token's centroid, among all keys before the
    previous block.
  rest: the other keys before the previous block. The centroid attends to them in place of the
    token, and their logits are corrected by the second term of Jensen's gap: the mean of exp(q.k)
    over queries q around a centroid c with variance var is about exp(c.k + var |k|^2 / 2).

The memory of a head has, for each of C centroids, the R best keys with their values, and one vector
for the rest, so its size is constant. If centroids were means of earlier queries, they would move
from block to block, and the summary of a moved centroid would have to be computed again from all
keys.

In shapes, a segment has T tokens in N blocks of W tokens, and Z = T + W is the number of keys of
the cached block and the segment together. C is the number of centroids of a head, and R the number
of keys that each centroid keeps.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.causal_clustered_attention import pallas, reference, xla
from brt.ops.causal_clustered_attention.centroid_memory import (
    CentroidMemory,
    Centroids,
    FarInputs,
    empty_memory_unless,
)
from brt.ops.dispatch import Implementation, Op
from brt.ops.partial_attention import AttentionPart

OP = Op(
    "causal_clustered_attention",
    (
        Implementation(
            "pallas_tpu", functools.partial(pallas.attend, backend="tpu"),
            functools.partial(pallas.refusal, "tpu"),
        ),
        Implementation(
            "pallas_gpu", functools.partial(pallas.attend, backend="gpu"),
            functools.partial(pallas.refusal, "gpu"),
        ),
        Implementation("xla", xla.attend),
        Implementation(
            "pallas_interpret", functools.partial(pallas.attend, backend="tpu", interpret=True)
        ),
        Implementation("reference", reference.attend),
    ),
)  # fmt: skip


def memory_scan(
    keys: Float[Array, "B Z H K"],
    values: Float[Array, "B Z H K"],
    cache_mask: Bool[Array, "B N"],
    past: CentroidMemory,
    centroids: Centroids,
    *,
    implementation: str | None = None,
) -> tuple[CentroidMemory, CentroidMemory]:
    """Returns the memory that the block after the segment reads, and the memories of the segment.

    The second result stacks, on axis 0, the memories that the N blocks of the segment read.

    Args:
      keys, values: the keys and values of the cached block (the last block before the segment),
        followed by those of the segment. Keys have no rotary embedding.
      cache_mask: False where block n begins a new document and reads an empty memory.
      past: the memory that the first block of the segment reads.
    """
    # No kernel updates the memory, so plain XLA does it for all implementations but the reference.
    scan = reference.memory_scan if implementation == "reference" else xla.memory_scan
    with jax.named_scope(OP.name):
        return scan(keys, values, cache_mask, past, centroids)


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
    """Returns the attention output of every token over all earlier tokens.

    Args:
      queries: already multiplied by any scale, without rotary embedding.
      window: the result of attention to each token's window.
      keys, values, cache_mask: as for `memory_scan`, whose second result is `pasts`.
      bias: added to the logits of all keys outside the window.
      attend_to_self: True if a token's window ends with the token itself, False if it ends with
        the token before.
    """
    inputs = FarInputs(queries, window, keys, values, cache_mask, pasts, centroids, bias)
    return dispatch.run(OP, implementation, inputs, attend_to_self=attend_to_self)


def causal_clustered_attention_step(
    queries: Float[Array, "B 1 H K"],
    window: AttentionPart,
    keys: Float[Array, "B W H K"],
    values: Float[Array, "B W H K"],
    cache_mask: Bool[Array, " B"],
    position: Int[Array, " B"],
    past: CentroidMemory,
    centroids: Centroids,
    bias: Float[Array, " H"],
    *,
    attend_to_self: bool = True,
) -> Float[Array, "B 1 H K"]:
    """Returns `causal_clustered_attention` of a single token, for decoding.

    Args:
      keys, values: the keys and values of the complete block before the token's block.
      cache_mask: True if the token may read the previous block and the memory.
      position: the index of the token in its block.
      past: the memory that the token's block reads.
    """
    left = jnp.arange(keys.shape[1])[None] < position[:, None] + (1 if attend_to_self else 0)
    mask = (left & cache_mask[:, None])[:, None]
    part = AttentionPart(*(x.swapaxes(1, 2) for x in window))
    q, k, v = (x.swapaxes(1, 2) for x in (queries, keys, values))
    y = xla.attend_block(
        q, part, k, v, mask, empty_memory_unless(past, cache_mask), centroids, bias
    )
    return y.swapaxes(1, 2)
