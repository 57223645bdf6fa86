import jax.numpy as jnp
import numpy as np
import pytest

from brt.ops.positions import relative_bias, t5_buckets


def test_near_distances_have_their_own_bucket_and_far_ones_share() -> None:
    buckets = t5_buckets(np.arange(1000), buckets=32, max_distance=128)
    np.testing.assert_array_equal(buckets[:16], np.arange(16))
    assert np.all(np.diff(buckets) >= 0)
    assert set(buckets[:128]) == set(range(32)) and np.all(buckets[128:] == 31)


@pytest.mark.parametrize("attend_to_self", [True, False])
def test_bias_is_the_table_by_distance(attend_to_self: bool) -> None:
    table = jnp.arange(2 * 8, dtype=jnp.float32).reshape(2, 8)
    bias = relative_bias(table, window=6, attend_to_self=attend_to_self, max_distance=8)
    # By hand: distances 0 1 2 3 are exact, 4 and 5 share the first wide bucket, 6 the next.
    buckets = [0, 1, 2, 3, 4, 5, 6] if attend_to_self else [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(bias, table[:, np.array(buckets[:6])])
