"""The loss of distillation: the KL divergence KL(teacher || student) of each token's predictions.

The float32 logits of a long segment would be the largest arrays of a train step, so they are
computed for one chunk of tokens at a time, and again in the backward pass. In shapes, D is the
size of a token's vector, and V the size of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.distributed.rules import constrain
from brt.ops.cross_entropy.chunks import chunk_length, split_chunks
from brt.ops.softmax import soft_capped

Logits = Float[Array, "B T V"]


def divergence(student: Logits, teacher: Logits) -> Float[Array, "B T"]:
    """Returns KL(teacher || student) in nats (Hinton et al. 2015)."""
    ours, theirs = (jax.nn.log_softmax(logits) for logits in (student, teacher))
    return jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)


def summed_divergence(
    student: Float[Array, "B T D"],
    teacher: Float[Array, "B T D"],
    mask: Bool[Array, "B T"],
    student_weights: Float[Array, "V D"],
    teacher_weights: Float[Array, "V D"],
    *,
    scale: float,
    soft_cap: float = 0.0,
    chunk: int,
) -> Float[Array, ""]:
    """Returns the sum of `divergence` over the tokens where `mask` is True.

    `student` and `teacher` are the last hidden vectors of each token. The logits of a vector are
    scale * vector @ weights.T, capped by `softmax.soft_capped`. At most `chunk` tokens of a row
    have logits at once. The teacher gets no gradient.
    """
    teacher, teacher_weights = jax.lax.stop_gradient((teacher, teacher_weights))
    chunk = chunk_length(student.shape[1], chunk)

    def logits(vectors: Float[Array, "B C D"], weights: Float[Array, "V D"]) -> Logits:
        weights = weights.astype(vectors.dtype)
        products = jnp.einsum("bcd,vd->bcv", vectors, weights, preferred_element_type=jnp.float32)
        logits = soft_capped(scale * products, soft_cap)
        return constrain(logits, "lanes", "tokens", "vocab")

    @jax.checkpoint
    def chunk_divergence(
        piece: tuple[Array, Array, Array], weights: Float[Array, "V D"]
    ) -> Float[Array, ""]:
        ours, theirs, counts = piece
        nats = divergence(logits(ours, weights), logits(theirs, teacher_weights))
        return jnp.sum(jnp.where(counts, nats, 0.0))

    def add_chunk(total: Array, piece: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + chunk_divergence(piece, student_weights), None

    pieces = tuple(split_chunks(x, chunk) for x in (student, teacher, mask))
    return jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), pieces)[0]
