"""Utterances with their transcripts: tokens in order, wherever in the frames they are."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.ops.ctc import ctc_nats
from brt.ops.spec_augment import spec_augment
from brt.training.objectives.encoders import network
from brt.types import SpeechBatch

_DROPOUT, _ATTENTION, _MASKS = 0, 1, 2  # what the key of a step is folded with


def loss(
    params: PyTree[Array], carried: tuple[()], batch: SpeechBatch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed nats of the transcripts."""
    speech = config.speech
    dropout, attention, masks = (jax.random.fold_in(key, i) for i in (_DROPOUT, _ATTENTION, _MASKS))
    features = batch.features
    if speech.time_masks or speech.feature_masks:
        features = spec_augment(
            features, batch.valid, masks,
            time_masks=speech.time_masks, time_mask_frames=speech.time_mask_frames,
            feature_masks=speech.feature_masks, feature_mask_width=speech.feature_mask_width,
        )  # fmt: skip
    logits = network(config, training=True).apply(
        {"params": params}, features, batch.valid, attention, rngs={"dropout": dropout}
    )
    nats = jnp.sum(ctc_nats(logits, batch.valid, batch.targets, batch.scored))
    return nats, (nats, carried)
