"""The loss of connectionist temporal classification (CTC; Graves et al., 2006).

In shapes, B is the number of rows of the batch, X of frames of a row, C of classes, and T of
targets of a row.
"""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int


def ctc_nats(
    logits: Float[Array, "B X C"],
    valid: Bool[Array, "B X"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
) -> Float[Array, " B"]:
    """Returns the negative log probability of each row's targets, float32.

    An alignment assigns a target or the blank to each frame. The blank is the last class. The
    probability of the targets is the sum of the probabilities of all alignments. A row without
    valid frames has loss 0.

    Args:
      logits: the logits of the C classes for each of the X frames.
      valid: True for the first frames of a row, False for padding.
      targets: the tokens to be recognized.
      scored: True for the first tokens of a row, False for padding.
    """
    logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    nats = optax.ctc_loss(
        logits, 1.0 - valid, jnp.where(scored, targets, 0), 1.0 - scored,
        blank_id=logits.shape[-1] - 1,
    )  # fmt: skip
    return jnp.where(valid.any(axis=1), nats, 0.0)
