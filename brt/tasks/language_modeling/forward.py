"""The forward pass of a language model on a segment, for training, evaluation and probes.

In shapes, B is the number of rows of the batch, T the number of tokens of a segment, and N
the number of its blocks.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.config import Config
from brt.layers.basic import dropout_rngs
from brt.layers.runs import StackState
from brt.models.decoder import Decoder, DecoderOutput, logit_scale, output_weights
from brt.ops.cross_entropy import token_scores
from brt.types import Batch, Variables


def predict(
    config: Config,
    variables: Variables,
    carry: StackState,
    batch: Batch,
    dropout: Array | None = None,
) -> DecoderOutput:
    """Returns the hidden vector of every token of a segment, and the state after the segment.

    `dropout` is a random key; None disables dropout.
    """
    output: Any = Decoder(config.model, dropout is not None, config.kernels).apply(
        {"params": variables.params}, batch.inputs, carry, batch.document_start,
        variables.model_state,
        rngs=None if dropout is None else dropout_rngs(dropout),
    )  # fmt: skip
    return output


def segment_scores(
    config: Config, variables: Variables, carry: StackState, batch: Batch
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], StackState]:
    """Reads a segment, and returns three results:

    * the nats of every token, which are 0 if the token is not scored;
    * for every token, True if it was the most likely one;
    * the state after the segment.
    """
    model = config.model
    hidden, carry, *_ = predict(config, variables, carry, batch)
    nats, right = token_scores(
        hidden, output_weights(config.model, variables.params), batch.targets,
        scale=logit_scale(model), soft_cap=model.embedding.soft_cap,
        chunk=config.training.loss_chunk,
        implementation=config.kernels.token_scores,
    )  # fmt: skip
    return jnp.where(batch.scored, nats, 0.0), right, carry


def block_nats(
    config: Config, variables: Variables, carry: StackState, batch: Batch
) -> tuple[Float[Array, "B N"], StackState]:
    """Returns the nats of every block, summed over its tokens, and the state after the segment."""
    nats, _, carry = segment_scores(config, variables, carry, batch)
    return jnp.sum(nats.reshape(nats.shape[0], -1, config.model.block_length), axis=2), carry
