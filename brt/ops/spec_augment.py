"""SpecAugment: bands of time and of features that a model must do without (Park et al., 2019)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import row_keys


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
    keys = row_keys(key, len(features))
    frames, width = features.shape[1:]
    lengths = valid.sum(axis=1)

    def masked(key: Array, length: Int[Array, ""]) -> Bool[Array, "X F"]:
        of_time, of_features = jax.random.split(key)
        in_time = bands(of_time, length, frames, time_masks, time_mask_frames)
        whole = jnp.asarray(width)
        in_features = bands(of_features, whole, width, feature_masks, feature_mask_width)
        return in_time[:, None] | in_features[None]

    return jnp.where(jax.vmap(masked)(keys, lengths), 0, features)


def bands(
    key: Array, length: Int[Array, ""], size: int, count: int, widest: int
) -> Bool[Array, " size"]:
    """True in `count` bands, which may overlap."""
    of_widths, of_places = jax.random.split(key)
    limit = jnp.minimum(widest, length // 2)
    width = jnp.floor(jax.random.uniform(of_widths, (count, 1)) * (limit + 1))
    begin = jnp.floor(jax.random.uniform(of_places, (count, 1)) * (length - width + 1))
    place = jnp.arange(size)[None]
    return ((place >= begin) & (place < begin + width)).any(axis=0)
