"""The loss of speech recognition (CTC), and random masks of spectrograms (SpecAugment).

In shapes, X is the number of frames of a row, F the number of features of a frame, C the number of
classes (the last class is the blank), and T the number of targets.
"""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from brt.distributed.rules import lane_keys


def ctc_nats(
    logits: Float[Array, "B X C"],
    valid: Bool[Array, "B X"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
) -> Float[Array, " B"]:
    """Returns the negative log probability of each row's targets; 0 for a row without frames.

    This is the loss of connectionist temporal classification (CTC; Graves et al., 2006). The
    probability is a sum over all alignments of frames with targets and blanks. `valid` and
    `scored` are True for the first frames and targets of a row and False for padding.
    """
    logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    nats = optax.ctc_loss(
        logits, 1.0 - valid, jnp.where(scored, targets, 0), 1.0 - scored,
        blank_id=logits.shape[-1] - 1,
    )  # fmt: skip
    return jnp.where(valid.any(axis=1), nats, 0.0)


def spec_augment(
    features: Float[Array, "B X F"],
    valid: Bool[Array, "B X"],
    key: Array,
    *,
    time_masks: tuple[int, int],
    feature_masks: tuple[int, int],
) -> Float[Array, "B X F"]:
    """Returns a spectrogram with random bands of time and of features set to 0.

    This is SpecAugment (Park et al., 2019); 0 is the mean of normalized features. The bands are
    drawn for each row of the batch. `time_masks` and `feature_masks` are pairs (number of bands,
    largest width). The width of a band of time is drawn uniformly from 0 to a limit, which is the
    smaller of the largest width and half of the row's valid frames. The limit for a band of
    features is the smaller of the largest width and half of the features. The position is drawn
    uniformly from all positions where the band fits.
    """
    keys = lane_keys(key, len(features))
    frames, width = features.shape[1:]
    lengths = valid.sum(axis=1)

    def row_mask(key: Array, length: Int[Array, ""]) -> Bool[Array, "X F"]:
        time_key, feature_key = jax.random.split(key)
        in_time = random_bands(time_key, length, frames, *time_masks)
        whole = jnp.asarray(width)
        in_features = random_bands(feature_key, whole, width, *feature_masks)
        return in_time[:, None] | in_features[None]

    return jnp.where(jax.vmap(row_mask)(keys, lengths), 0, features)


def random_bands(
    key: Array, length: Int[Array, ""], size: int, count: int, widest: int
) -> Bool[Array, " size"]:
    """Returns a mask of `size` entries that is True in `count` random bands, which may overlap.

    A band is within the first `length` entries, covers at most half of them, and has at most
    `widest` entries.
    """
    width_key, place_key = jax.random.split(key)
    limit = jnp.minimum(widest, length // 2)
    width = jnp.floor(jax.random.uniform(width_key, (count, 1)) * (limit + 1))
    begin = jnp.floor(jax.random.uniform(place_key, (count, 1)) * (length - width + 1))
    place = jnp.arange(size)[None]
    return ((place >= begin) & (place < begin + width)).any(axis=0)
