import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.relative_bias import bias_row, bias_tile, relative_buckets

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
DISTANCES = {"max_distance": 20}


def bucket(offset: int, buckets: int, max_distance: int, both_ways: bool) -> int:
    """Returns the bucket of an offset by the rule of T5's paper and code, in plain Python."""
    first = 0
    if both_ways:
        buckets //= 2
        first, distance = (buckets if offset > 0 else 0), abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(max_distance / exact)
    return first + min(exact + int(share * (buckets - exact)), buckets - 1)


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_those_of_t5(both_ways: bool) -> None:
    # With an odd maximum distance, no logarithm is so close to a border between buckets that
    # float64 here and float32 in T5 round to different buckets.
    offsets = np.arange(-300, 301)
    found = relative_buckets(offsets, buckets=32, max_distance=131, both_ways=both_ways)
    np.testing.assert_array_equal(found, [bucket(o, 32, 131, both_ways) for o in offsets])


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "first"),
    [(5, 5, 0), (4, 12, -4), (3, 7, 2), (256, 384, -130), (384, 128, 5), (128, 256, 0)],
)
def test_a_tile_holds_the_bias_of_every_pair(
    queries: int, keys: int, first: int, both_ways: bool
) -> None:
    tile = bias_tile(TABLE, queries, keys, first=first, both_ways=both_ways, **DISTANCES)
    offset = np.arange(keys)[None] + first - np.arange(queries)[:, None]
    rows = relative_buckets(offset, buckets=8, both_ways=both_ways, **DISTANCES)
    np.testing.assert_array_equal(tile, np.asarray(TABLE)[rows].transpose(2, 0, 1))


@pytest.mark.parametrize("size", [6, 256])
def test_the_gradient_counts_how_often_a_bucket_is_used(size: int) -> None:
    gradient = jax.grad(lambda t: jnp.sum(bias_tile(t, size, size, both_ways=True, **DISTANCES)))
    offset = np.arange(size)[None] - np.arange(size)[:, None]
    rows = relative_buckets(offset, buckets=8, both_ways=True, **DISTANCES)
    counts = np.bincount(rows.ravel(), minlength=8)
    np.testing.assert_array_equal(gradient(TABLE), np.repeat(counts[:, None], 3, axis=1))


def test_a_row_at_run_time_is_that_of_the_tile() -> None:
    tile = bias_tile(TABLE, 9, 9, both_ways=False, **DISTANCES)
    row = jax.jit(lambda t: bias_row(TABLE, t, 9, **DISTANCES))
    for t in range(9):
        np.testing.assert_array_equal(row(jnp.asarray(t)), tile[:, t : t + 1])
