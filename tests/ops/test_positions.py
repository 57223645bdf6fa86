import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops import dispatch
from brt.ops.positions import (
    alibi_bias,
    bias_row,
    bias_tile,
    relative_bias,
    relative_buckets,
    rotary_speeds,
    rotate,
    rotations,
    t5_buckets,
)


def test_near_distances_have_their_own_bucket_and_far_ones_share() -> None:
    buckets = t5_buckets(np.arange(1000), buckets=32, max_distance=128)
    np.testing.assert_array_equal(buckets[:16], np.arange(16))
    assert np.all(np.diff(buckets) >= 0)
    assert set(buckets[:128]) == set(range(32)) and np.all(buckets[128:] == 31)


@pytest.mark.parametrize("attend_to_self", [True, False])
def test_bias_is_the_table_by_distance(attend_to_self: bool) -> None:
    table = jnp.arange(2 * 8, dtype=jnp.float32).reshape(2, 8)
    bias = relative_bias(table, window=6, attend_to_self=attend_to_self, max_distance=8)
    # Distances 0 to 3 have a bucket each, 4 and 5 share the first wider bucket, and 6 is in the
    # next one.
    buckets = [0, 1, 2, 3, 4, 5, 6] if attend_to_self else [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(bias, table[:, np.array(buckets[:6])])


@pytest.mark.parametrize("attend_to_self", [True, False])
def test_alibi_falls_with_the_distance_down_to_its_bound(attend_to_self: bool) -> None:
    options = {"heads": 2, "window": 5, "attend_to_self": attend_to_self}
    distances = np.arange(5) + (not attend_to_self)
    for sign in (1, -1):
        bias = alibi_bias(jnp.asarray(sign * 4.0), jnp.array([sign * 0.5]), **options)
        slopes = 4.0 * np.array([2.0**-4, 2.0**-8])  # 2 ** (-8 i / heads), multiplied by the scale
        np.testing.assert_allclose(bias, np.maximum(-slopes[:, None] * distances, -0.5))


def test_rotated_products_depend_on_the_distance_alone() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 2, 8)).astype(np.float32)

    def product(of_query: int, of_key: int) -> np.ndarray:
        rotated = (
            rotate(jnp.asarray(x), rotations(place, 1, rotary_speeds(8)))
            for x, place in ((q, of_query), (k, of_key))
        )
        return np.sum(np.multiply(*rotated), axis=-1)

    for place in (0, 3, 50_000):  # The last position is far into a long segment.
        np.testing.assert_allclose(product(place, place - 5), product(0, -5), atol=2e-6)
    np.testing.assert_allclose(product(7, 7), np.sum(q * k, axis=-1), atol=2e-6)
    assert np.abs(product(0, -4) - product(0, -5)).max() > 0.1


def test_channels_i_and_half_plus_i_turn_together_each_pair_more_slowly() -> None:
    x = jnp.eye(4, dtype=jnp.bfloat16)[None, :, None]  # [B, T, H, K]: a channel per token
    y = rotate(x, rotations(0, 4, rotary_speeds(4)))
    assert y.dtype == x.dtype
    slow = np.arange(4) / 100  # 10000 ** (i / 2)
    expected = np.array([
        [1, 0, 0, 0], [0, np.cos(slow[1]), 0, np.sin(slow[1])],
        [-np.sin(2), 0, np.cos(2), 0], [0, -np.sin(slow[3]), 0, np.cos(slow[3])],
    ])  # fmt: skip
    np.testing.assert_allclose(y[0, :, 0].astype(jnp.float32), expected, atol=4e-3)


@pytest.mark.slow_cases("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_that_exchange_channels_by_a_product_rotate_equally(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8), dtype)
    rotation = rotations(-2, 5, rotary_speeds(8))

    def rotated() -> tuple[jax.Array, jax.Array]:
        """Returns the rotated vectors, and the gradient of the sum of their cubes."""
        y, pull = jax.vjp(lambda x: rotate(x, rotation), x)
        return y, pull(3 * y**2)[0]

    expected = rotated()
    policy = dispatch.policy()._replace(turns_by_product=True)
    monkeypatch.setattr(dispatch, "policy", lambda: policy)
    for found, wanted in zip(rotated(), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


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


@pytest.mark.slow_cases("3-7-*", "384-128-*", "128-256-*")
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


@pytest.mark.slow_cases("6")
@pytest.mark.parametrize("size", [6, 256])
def test_the_gradient_counts_how_often_a_bucket_is_used(size: int) -> None:
    gradient = jax.grad(lambda t: jnp.sum(bias_tile(t, size, size, both_ways=True, **DISTANCES)))
    offset = np.arange(size)[None] - np.arange(size)[:, None]
    rows = relative_buckets(offset, buckets=8, both_ways=True, **DISTANCES)
    counts = np.bincount(rows.ravel(), minlength=8)
    np.testing.assert_array_equal(jax.jit(gradient)(TABLE), np.repeat(counts[:, None], 3, axis=1))


def test_a_row_at_run_time_is_that_of_the_tile() -> None:
    tile = bias_tile(TABLE, 9, 9, both_ways=False, **DISTANCES)
    row = jax.jit(lambda t: bias_row(TABLE, t, 9, **DISTANCES))
    for t in range(9):
        np.testing.assert_array_equal(row(jnp.asarray(t)), tile[:, t : t + 1])
