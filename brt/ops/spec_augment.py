"""SpecAugment: bands of time and of features that a model must do without (Park et al., 2019)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def spec_augment(
    features: Float[Array, "B X F"],
    valid: Bool[Array, "B X"],
    key: Array,
    *,
    time_masks: int,
    time_mask_frames: int,
    feature_masks: int,
    feature_mask_width: int,
) -> Float[Array, "B X F"]:
    """The features with some bands at 0, their mean; drawn anew for every row.

    A band's width is uniform from 0 to the given one, but of time no more than half of the
    row's frames; its place is uniform where it fits.
    """
    time_key, feature_key = jax.random.split(key)
    frames, width = features.shape[1:]
    lengths = valid.sum(axis=1)
    in_time = bands(time_key, lengths, frames, time_masks, time_mask_frames)
    widths = jnp.full_like(lengths, width)
    in_features = bands(feature_key, widths, width, feature_masks, feature_mask_width)
    return jnp.where(in_time[:, :, None] | in_features[:, None, :], 0, features)


def bands(
    key: Array, lengths: Int[Array, " B"], size: int, count: int, widest: int
) -> Bool[Array, "B size"]:
    """True in `count` bands of each row, which may overlap."""
    width_key, place_key = jax.random.split(key)
    shape = (len(lengths), count)
    limit = jnp.minimum(widest, lengths // 2)[:, None]
    width = jnp.floor(jax.random.uniform(width_key, shape) * (limit + 1))
    begin = jnp.floor(jax.random.uniform(place_key, shape) * (lengths[:, None] - width + 1))
    place = jnp.arange(size)[None, None]
    inside = (place >= begin[..., None]) & (place < (begin + width)[..., None])
    return inside.any(axis=1)
