"""The forward pass, which loss and evaluation share: only masked tokens get through the head."""

from typing import Any

import jax
from jaxtyping import Array, Float, PyTree

from brt.config import Config
from brt.models import encoder
from brt.models.encoder import EncoderWithHead
from brt.models.seq2seq import Readout
from brt.ops.token_masking import MaskedTokens, mask_tokens
from brt.types import Batch


def masked(config: Config, batch: Batch, keys: Array) -> MaskedTokens:
    """The tokens of a batch with those that are to be predicted; the mask is the last id."""
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
    """Vectors of the masked tokens, and what makes logits of them.

    Args:
      attention: the key of what attention draws.
      dropout: the key of a training step's; None: nothing is dropped.
    """
    hidden: Any = network.apply(
        {"params": params}, tokens.inputs, batch.scored, attention, tokens.positions,
        rngs=None if dropout is None else {"dropout": dropout}, method="at",
    )  # fmt: skip
    return hidden, encoder.readout(params)
