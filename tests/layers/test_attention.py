import dataclasses

import jax.numpy as jnp
import numpy as np

from brt.config import Model
from brt.layers.attention import TokenProjections, with_cache
from brt.layers.state import WindowState

MODEL = Model(window=2, heads=1, head_dim=1)


def test_the_cache_is_read_where_a_document_goes_on_and_kept_for_the_next_segment() -> None:
    tokens = jnp.arange(2 * 6, dtype=jnp.float32).reshape(2, 6, 1, 1)
    state = WindowState(tokens[:, :2] - 100, tokens[:, :2] - 200, jnp.array([True, False]))
    start = jnp.array([[False, False, True], [False, True, False]])
    projections = TokenProjections(tokens, tokens, -tokens, None)

    keys, values, readable, after = with_cache(MODEL, state, projections, start)
    np.testing.assert_array_equal(keys[0, :, 0, 0], [-100, -99, 0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(values[0, :, 0, 0], [-200, -199, 0, -1, -2, -3, -4, -5])
    np.testing.assert_array_equal(readable, [[True, True, False], [False, False, True]])
    np.testing.assert_array_equal(after.keys, tokens[:, 4:])
    np.testing.assert_array_equal(after.values, -tokens[:, 4:])
    assert after.valid.all()

    parity = dataclasses.replace(MODEL, mask_empty_cache=False)
    keys, values, _, _ = with_cache(parity, state, projections, start)
    assert keys[0, :2].all() and not keys[1, :2].any() and not values[1, :2].any()
