"""Connectionist temporal classification (Graves et al., 2006)."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int


def ctc_nats(
    logits: Float[Array, "B X C"],
    valid: Bool[Array, "B X"],
    targets: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
) -> Float[Array, " B"]:
    """-log p(targets), summed over all ways to place them on the frames; the last token is blank.

    0 for a row without a frame. Masks are True on the first frames and the first tokens.
    """
    logits = jnp.where(valid[..., None], logits.astype(jnp.float32), 0.0)
    nats = optax.ctc_loss(
        logits, 1.0 - valid, jnp.where(scored, targets, 0), 1.0 - scored,
        blank_id=logits.shape[-1] - 1,
    )  # fmt: skip
    return jnp.where(valid.any(axis=1), nats, 0.0)
