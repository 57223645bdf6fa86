"""The forward pass of masked language models. Only masked tokens pass through the head.

In shapes, B is the number of segments in a batch, R the number of masked tokens of a segment, and D
the width of the model.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import encoder
from brt.models.encoder import EncoderWithHead
from brt.models.seq2seq import Readout
from brt.ops.token_masking import MaskedTokens, mask_tokens
from brt.types import Batch


def mask_batch(config: Config, batch: Batch, keys: Array) -> MaskedTokens:
    """Chooses tokens to predict at random, and replaces most of them by the mask or another token.

    The last id of the vocabulary is the mask. `keys` has a random key for each row.
    """
    return mask_tokens(
        batch.targets, batch.scored, keys,
        share=config.training.mask_share, mask_id=config.encoder.vocab_size - 1,
    )  # fmt: skip


def predict(
    network: EncoderWithHead,
    params: PyTree[Array],
    batch: Batch,
    tokens: MaskedTokens,
    attention: jax.Array,
    dropout: jax.Array | None = None,
) -> tuple[Float[Array, "B R D"], Readout]:
    """Returns the hidden vectors of the masked tokens, and the readout that maps them to logits.

    `attention` and `dropout` are random keys; None in `dropout` disables dropout.
    """
    hidden: Any = network.apply(
        {"params": params}, tokens.inputs, batch.scored, attention, tokens.positions,
        rngs=None if dropout is None else {"dropout": dropout}, method="head_at_positions",
    )  # fmt: skip
    return hidden, encoder.readout(params)
