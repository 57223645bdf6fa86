"""K-means of hash codes on GPUs, as a Pallas kernel for the Triton backend.

A hash code is a vector of bits +1 and -1, and each centroid is such a vector, too. A program of the
kernel runs all iterations for one head. In each iteration, it loops over tiles of codes: products
of the tile and the centroids rank the centroids by their distance from each code, and the product
of the resulting memberships and the codes adds up the codes of each cluster. No sum needs atomic
additions. `kmeans_tpu` has the same arithmetic, and describes it.

In shapes, T is the number of codes of a head, P of bits of a code, and C of clusters. T', P' and C'
are T, P and C after padding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from brt.ops.clustered_attention.kmeans_tpu import on_devices
from brt.ops.gpu import LaunchShape, dot_float32, triton_refusal

# More clusters or bits do not fit into the registers of a program.
_MAX_CLUSTERS, _MAX_BITS = 128, 64
# With these parameters, the compiler for sm_90a (H100, H200) spills no registers.
_LAUNCH = LaunchShape(rows=64, columns=0, warps=8, stages=2)
# This number is added to the ranks of centroids that no code may be assigned to. It is greater than
# all other ranks.
_UNUSED = 2.0**22


def refusal(
    codes: Float[Array, "B H T P"],
    valid: Any,
    centroids: Float[Array, "B H C P"],
    *_: Any,
    **__: Any,
) -> str | None:
    """Returns why the kernel does not support these inputs, or None if it does."""
    if centroids.shape[2] > _MAX_CLUSTERS:
        return f"has {_MAX_CLUSTERS} clusters at most, not {centroids.shape[2]}"
    if codes.shape[3] > _MAX_BITS:
        return f"has codes of {_MAX_BITS} bits at most, not of {codes.shape[3]}"
    return triton_refusal()


def kmeans(
    codes: Float[Array, "B H T P"],
    valid: Bool[Array, "B T"],
    centroids: Float[Array, "B H C P"],
    active: Bool[Array, "B C"],
    *,
    iterations: int,
    interpret: bool = False,
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    """Implements `clustering.kmeans`."""
    local = functools.partial(_local, iterations=iterations, interpret=interpret)
    return on_devices(local, codes, valid, centroids, active)


interpreted = functools.partial(kmeans, interpret=True)


class _Inputs(NamedTuple):
    """Inputs of a program, or of all programs with axes of rows and heads in front."""

    # bfloat16 [T', P']. Padding is zero.
    codes: Any
    # float32 [T'], 1 for codes and 0 for padding.
    exist: Any
    # bfloat16 [C', P'], the initial centroids.
    centroids: Any
    # float32 [C'], the index of each centroid, plus `_UNUSED` if no code may be assigned to it.
    ranks: Any


def _local(
    codes: Array, valid: Array, centroids: Array, active: Array, *, iterations: int, interpret: bool
) -> tuple[Int[Array, "B H T"], Float[Array, "B H C P"]]:
    (batch, heads, tokens, bits), clusters = codes.shape, centroids.shape[2]
    width, used = (max(pl.next_power_of_2(size), 16) for size in (bits, clusters))
    rows = -(-tokens // _LAUNCH.rows) * _LAUNCH.rows
    existing = jnp.where(valid[:, None, :, None], codes, 0).astype(jnp.bfloat16)
    ranks = jnp.arange(used)[None] + jnp.where(_padded(active, 1, used), 0, _UNUSED)
    inputs = _Inputs(
        _padded(_padded(existing, 3, width), 2, rows),
        _padded(valid.astype(jnp.float32), 1, rows),
        _padded(_padded(centroids.astype(jnp.bfloat16), 3, width), 2, used),
        ranks.astype(jnp.float32),
    )
    labels, found = pl.pallas_call(
        functools.partial(kmeans_kernel, iterations=iterations),
        grid=(heads, batch),
        in_specs=[
            _Inputs(
                _by_head(inputs.codes),
                pl.BlockSpec((None, rows), lambda h, b: (b, 0)),
                _by_head(inputs.centroids),
                pl.BlockSpec((None, used), lambda h, b: (b, 0)),
            )
        ],
        out_specs=[
            pl.BlockSpec((None, None, rows), lambda h, b: (b, h, 0)),
            _by_head(inputs.centroids),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(inputs.codes.shape[:3], jnp.int32),
            jax.ShapeDtypeStruct(inputs.centroids.shape, jnp.bfloat16),
        ],
        interpret=interpret, compiler_params=_LAUNCH.compiler_params(),
    )(inputs)  # fmt: skip
    labels = jnp.where(valid[:, None], labels[:, :, :tokens], clusters)
    return labels, found[:, :, :clusters, :bits].astype(centroids.dtype)


def _by_head(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda h, b: (b, h, 0, 0))


def _padded(x: Array, axis: int, size: int) -> Array:
    """Returns x, padded with zeros or False along an axis to a size."""
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def kmeans_kernel(inputs: _Inputs, labels: Any, centroids: Any, *, iterations: int) -> None:
    """Writes the cluster of each code of a head, int32 [T'], and the centroids [C', P']."""
    used = inputs.centroids.shape[0]
    ranks, rows = inputs.ranks[:][:, None], _LAUNCH.rows
    tiles = inputs.codes.shape[0] // rows

    def ranked(codes: Array, means: Array) -> Array:
        # The smallest of the C' results of a code belongs to its cluster: the product of two codes
        # is the number of equal bits minus the number of different bits.
        return ranks - used * dot_float32(means, codes.T)

    def update(_: Any, means: Array) -> Array:
        # A bit of a centroid is the majority of the cluster's codes, -1 for a tie.
        def add_tile(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            own = pl.ds(i * rows, rows)
            codes = inputs.codes[own]
            order = ranked(codes, means)
            members = (order == jnp.min(order, axis=0)[None]).astype(jnp.float32)
            counts = sums[1] + jnp.sum(members * inputs.exist[own][None], axis=1)
            return sums[0] + dot_float32(members.astype(codes.dtype), codes), counts

        zeros = jnp.zeros(means.shape, jnp.float32), jnp.zeros(used, jnp.float32)
        sums, counts = jax.lax.fori_loop(0, tiles, add_tile, zeros)
        majority = jnp.where(sums > 0, 1.0, -1.0).astype(means.dtype)
        return jnp.where((counts > 0)[:, None], majority, means)

    means = jax.lax.fori_loop(0, iterations - 1, update, inputs.centroids[:, :])
    centroids[:, :] = means

    def assign(i: Any, _: None) -> None:
        own = pl.ds(i * rows, rows)
        smallest = jnp.min(ranked(inputs.codes[own], means), axis=0)
        # The low bits of a rank are the index of its centroid.
        labels[own] = smallest.astype(jnp.int32) & (used - 1)

    jax.lax.fori_loop(0, tiles, assign, None)
