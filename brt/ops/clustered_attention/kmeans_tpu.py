"""K-means of hash codes on TPUs: codes and centroids stay in VMEM through all iterations.

A hash code is a vector of bits +1 and -1, and each centroid is such a vector, too. The grid is
(head, row of the batch, iteration). The product of two codes is the number of equal bits minus the
number of different bits, exact in float32. Centroids are scaled by minus the number of clusters, a
power of 2, and each centroid's index is added to the products. The smallest result then belongs to
the nearest centroid and, among equally near ones, to the first; its low bits are the index. The
comparison with the smallest result gives a matrix of zeros and ones, whose product with the codes
sums up the codes of each cluster. A row of ones below the codes counts them. Padding is zero and
adds nothing.

In shapes, T is the number of codes of a head, P of bits of a code, and C of clusters. P' and C' are
P and C after padding; P' includes the row of ones.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from brt.distributed import rules
from brt.ops import dispatch
from brt.ops.clustered_attention.config import Codes
from brt.ops.tpu import (
    LANES,
    NN,
    NT,
    dot_float32,
    head_block_spec,
    parallel_heads,
    unrolled_loop,
    vmem_refusal,
)

_MAX_CLUSTERS = 1024
# This number is added to the distances of centroids that no code may be assigned to. The number is
# greater than all distances, so none of these centroids is the nearest of a code.
_UNUSED = 2.0**22
# A tile has this many distances, which fill half of the vector registers.
_TILE = 32 * 8 * LANES


def refusal(inputs: Codes, **_: Any) -> str | None:
    """Returns why the kernel does not support these inputs, or None if it does."""
    (tokens, bits), clusters = inputs.codes.shape[2:], inputs.centroids.shape[2]
    if clusters > _MAX_CLUSTERS:
        return f"has {_MAX_CLUSTERS} clusters at most, not {clusters}"
    if bits > LANES - 8:
        return f"has codes of {LANES - 8} bits at most, not of {bits}"
    # A row of codes or of a centroid has at most LANES numbers. VMEM has two buffers for each block
    # that is copied in or out. A number of a code takes 2 bytes, so two buffers of codes take
    # 4 * LANES bytes per token. A number of a centroid takes 4 bytes. Two buffers for its initial
    # value, two for its result and one array of sums take 5 * 4 * LANES bytes per centroid.
    taken = 4 * LANES * (tokens + 5 * clusters)
    return vmem_refusal(taken, "codes")


def kmeans(
    inputs: Codes, *, iterations: int, interpret: bool | pltpu.InterpretParams = False
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    """Implements `clustering.kmeans`."""
    local: Any = functools.partial(_local, iterations=iterations, interpret=interpret)
    if rules.partitioned():
        by_head = rules.partition_spec("lanes", "heads", None, None, shape=inputs.codes.shape)
        by_row = rules.partition_spec("lanes", None, shape=inputs.valid.shape)
        specs = Codes(by_head, by_row, by_head, by_row)
        local = dispatch.on_devices(local, (specs,), (jax.P(*by_head[:3]), by_head))
    return local(inputs)


interpreted = functools.partial(kmeans, interpret=True)


class KMeansKernelInputs(NamedTuple):
    """Inputs of a step of the grid."""

    # [P', T], bfloat16. The first P rows have the bits +1 and -1 of each code, and row P has ones.
    # Columns of padding are zero.
    codes: Any
    # [C', P'], the initial centroids of +1 and -1.
    centroids: Any
    # [C', 1], the index of each cluster, plus `_UNUSED` if the cluster is not active.
    numbers: Any


def _local(
    inputs: Codes, *, iterations: int, interpret: Any
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    codes, valid, centroids, active = inputs
    batch, heads, tokens, bits = codes.shape
    count = centroids.shape[2]
    clusters = max(1 << (count - 1).bit_length(), 16)
    tile = max(_TILE // clusters // LANES, 1) * LANES
    rows = -(-(bits + 1) // 16) * 16
    spare = -tokens % (LANES if tokens <= tile else tile)
    ones = jnp.ones((batch, heads, tokens, 1), codes.dtype)
    all_codes = jnp.where(valid[:, None, :, None], jnp.concatenate([codes, ones], axis=-1), 0)
    all_codes = jnp.pad(all_codes, ((0, 0), (0, 0), (0, spare), (0, rows - bits - 1)))
    first = ((0, 0), (0, 0), (0, clusters - count), (0, rows - bits))
    numbers = jnp.pad(jnp.where(active, 0.0, _UNUSED), ((0, 0), (0, clusters - count)),
                      constant_values=_UNUSED)  # fmt: skip
    numbers += jnp.arange(clusters, dtype=jnp.float32)[None]
    arrays = KMeansKernelInputs(
        all_codes.swapaxes(2, 3).astype(jnp.bfloat16),
        jnp.pad(centroids, first),
        numbers[:, :, None],
    )
    width = tokens + spare
    lane_spec = pl.BlockSpec((None, clusters, 1), lambda h, b, i: (b, 0, 0))
    labels, results = pl.pallas_call(
        functools.partial(_kernel, bits=bits, tile=min(tile, width)),
        grid=(heads, batch, iterations),
        in_specs=[
            KMeansKernelInputs(
                head_block_spec(rows, width), head_block_spec(clusters, rows), lane_spec
            )
        ],
        out_specs=[head_block_spec(1, width), head_block_spec(clusters, rows)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, 1, width), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, clusters, rows), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((clusters, rows), jnp.float32)],
        name=f"kmeans_{width}x{clusters}_bits{rows}_{batch * heads * iterations}_steps",
        interpret=interpret,
        compiler_params=parallel_heads(3),
        cost_estimate=pl.CostEstimate(
            flops=4 * batch * heads * iterations * width * clusters * rows,
            transcendentals=0,
            bytes_accessed=2 * batch * heads * width * rows,
        ),
    )(arrays)
    labels = jnp.where(valid[:, None], labels[:, :, 0, :tokens], count)
    return labels, results[:, :, :count, :bits].astype(centroids.dtype)


def _kernel(
    inputs: KMeansKernelInputs, labels: Any, centroids: Any, sums: Any, *, bits: int, tile: int
) -> None:
    """Runs one iteration of k-means.

    The scratch memory `sums` keeps the sums [C', P'] over each cluster's codes, from which the next
    iteration computes the centroids.
    """
    step = pl.program_id(2)
    clusters = centroids.shape[0]

    @pl.when(step == 0)
    def _initialize() -> None:
        centroids[...] = inputs.centroids[...]

    @pl.when(step > 0)
    def _update() -> None:
        majority = jnp.where(sums[...] > 0, 1.0, -1.0)
        has_members = (sums[:, bits : bits + 1] > 0) & (
            jax.lax.broadcasted_iota(jnp.int32, sums.shape, 1) < bits
        )
        centroids[...] = jnp.where(has_members, majority, centroids[...])

    scaled = (centroids[...] * -float(clusters)).astype(jnp.bfloat16)
    sums[...] = jnp.zeros_like(sums)

    def assign_tile(i: Any, _: None) -> None:
        place = pl.ds(i * tile, tile)
        codes = inputs.codes[:, place]
        ranked = dot_float32(scaled, codes, NN) + inputs.numbers[...]
        least = jnp.min(ranked, axis=0, keepdims=True)
        labels[:, place] = least.astype(jnp.int32) & (clusters - 1)
        nearest = jnp.where(ranked == least, 1.0, 0.0).astype(jnp.bfloat16)
        sums[...] += dot_float32(nearest, codes, NT)

    unrolled_loop(labels.shape[1] // tile, assign_tile)
