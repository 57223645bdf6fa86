"""Masked tokens of documents, each from what is before and behind it."""

import jax
from jaxtyping import Array, Float, Int, PyTree

from brt.config import Config
from brt.models import encoder
from brt.ops.cross_entropy import smoothed_cross_entropy
from brt.ops.token_masking import MaskedTokens, counts, mask_tokens
from brt.training.objectives.encoders import network
from brt.types import Batch

# Purposes that a step's randomness is folded with.
_MASKS, _ATTENTION, _DROPOUT = range(3)


def masked(batch: Batch, keys: Array, config: Config) -> MaskedTokens:
    """The tokens of a batch with those that are to be predicted; the mask is the last id."""
    return mask_tokens(
        batch.targets, batch.scored, keys,
        share=config.training.mask_share, mask_id=config.encoder.vocab_size - 1,
    )  # fmt: skip


def scored(batch: Batch, config: Config) -> Int[Array, ""]:
    """How many tokens of a batch are predicted."""
    return counts(batch.scored, config.training.mask_share).sum()


def loss(
    params: PyTree[Array], carried: tuple[()], batch: Batch, key: Array, config: Config
) -> tuple[Float[Array, ""], tuple[Float[Array, ""], tuple[()]]]:
    """The summed loss of the masked tokens."""
    keys = [jax.random.fold_in(key, purpose) for purpose in (_MASKS, _ATTENTION, _DROPOUT)]
    tokens = masked(batch, jax.random.split(keys[_MASKS], len(batch.targets)), config)
    hidden = network(config, training=True).apply(
        {"params": params}, tokens.inputs, batch.scored, keys[_ATTENTION], tokens.positions,
        rngs={"dropout": keys[_DROPOUT]}, method="at",
    )  # fmt: skip
    out = encoder.readout(params)
    total, nats = smoothed_cross_entropy(
        hidden, out.embedding, tokens.targets, tokens.scored, out.scale,
        config.training.loss_chunk, config.training.label_smoothing, out.bias,
    )  # fmt: skip
    return total, (nats, carried)
