import jax
import jax.numpy as jnp
import numpy as np

from brt.ops.spec_augment import spec_augment

LENGTHS = np.array([40, 13, 1, 0])
SETTINGS = {"time_masks": 2, "time_mask_frames": 10, "feature_masks": 1, "feature_mask_width": 4}
augment = jax.jit(spec_augment, static_argnames=SETTINGS)


def masked(key, **changes):
    """Returns a boolean array [rows, frames, features], True where features were masked."""
    features = jnp.ones((4, 40, 12))
    valid = jnp.asarray(np.arange(40) < LENGTHS[:, None])
    return np.asarray(augment(features, valid, jax.random.key(key), **(SETTINGS | changes))) == 0


def test_bands_of_time_and_of_features():
    times, widths = [], []
    for key in range(30):
        found = masked(key)
        for row, length in zip(found, LENGTHS, strict=True):
            time, feature = row.all(axis=1), row.all(axis=0)
            rest = row[~time][:, ~feature]
            assert not rest.any(), "all that is masked is a whole band"
            assert time.sum() <= 2 * min(10, length // 2) and feature.sum() <= 4
            assert not time[length:].any(), "time that is not there is not masked"
            times.append(time.sum())
            widths.append(feature.sum())
    assert len(set(widths)) == 5 and max(times) > 10


def test_rows_and_keys_differ_and_a_key_repeats_itself():
    first = masked(0)
    np.testing.assert_array_equal(first, masked(0))
    assert (first != masked(1)).any() and (first[0] != first[1]).any()


def test_zero_masks_mask_nothing():
    assert not masked(0, time_masks=0, feature_masks=0).any()
    assert not masked(0, time_masks=0)[:3].all(axis=(2)).any()
