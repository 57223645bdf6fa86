"""The loss of connectionist temporal classification (CTC; Graves et al., 2006).

In shapes, X is the number of frames of a row, C of classes (the last is the blank), T of targets.
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
    """Returns the negative log probability of each row's targets; 0 for a row without frames.

    The probability is a sum over all alignments of frames with targets and blanks. `valid` and
    `scored` are True for the first frames and targets of a row and False for padding.
    """
    logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    nats = optax.ctc_loss(
        logits, 1.0 - valid, jnp.where(scored, targets, 0), 1.0 - scored,
        blank_id=logits.shape[-1] - 1,
    )  # fmt: skip
    return jnp.where(valid.any(axis=1), nats, 0.0)
