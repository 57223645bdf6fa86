"""The loss of distillation: the KL divergence KL(teacher || student) of each token's predictions.

The float32 logits [B, T, V] of a long segment would be the largest arrays of a train step. The loss
is therefore computed for one chunk of tokens at a time, and the backward pass computes the logits
of each chunk again.

In shapes, B is the number of rows of the batch, T of tokens of a row, C of tokens of a chunk, D of
numbers of a token's vector, and V of tokens of the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from brt.distributed.rules import constrain
from brt.ops.cross_entropy.chunks import chunk_length, split_chunks

Logits = Float[Array, "B T V"]


def divergence(student: Logits, teacher: Logits, temperature: float) -> Float[Array, "B T"]:
    """Returns KL(teacher || student) for each token, in nats, times the square of the temperature
    (Hinton et al. 2015, section 2).

    Args:
      student, teacher: the float32 logits of both models.
      temperature: the number by which the logits of both models are divided.
    """
    ours, theirs = (jax.nn.log_softmax(logits / temperature) for logits in (student, teacher))
    return temperature**2 * jnp.sum(jnp.exp(theirs) * (theirs - ours), axis=-1)


def summed_divergence(
    student: Float[Array, "B T D"],
    teacher: Float[Array, "B T D"],
    mask: Bool[Array, "B T"],
    student_weights: Float[Array, "V D"],
    teacher_weights: Float[Array, "V D"],
    *,
    scale: float,
    temperature: float,
    chunk: int,
) -> Float[Array, ""]:
    """Returns the result of `divergence`, summed over all tokens that count; the arguments of the
    teacher get no gradient.

    Args:
      student, teacher: the last hidden vector of each token in both models. A model's logits are
        scale * vectors @ weights.T.
      mask: False for tokens that do not count.
      student_weights, teacher_weights: the output embeddings of both models.
      scale: the factor of the logits of both models.
      temperature: the number by which the logits of both models are divided.
      chunk: the largest number of tokens of a lane (a row of the batch) whose logits exist at once.
    """
    teacher, teacher_weights = jax.lax.stop_gradient((teacher, teacher_weights))
    chunk = chunk_length(student.shape[1], chunk)

    def logits(vectors: Float[Array, "B C D"], weights: Float[Array, "V D"]) -> Logits:
        """Returns the float32 logits of the tokens of a chunk, computed from their vectors and the
        output embedding `weights` of a model.
        """
        weights = weights.astype(vectors.dtype)
        products = jnp.einsum("bcd,vd->bcv", vectors, weights, preferred_element_type=jnp.float32)
        return constrain(scale * products, "lanes", "tokens", "vocab")

    @jax.checkpoint
    def chunk_divergence(
        piece: tuple[Array, Array, Array], weights: Float[Array, "V D"]
    ) -> Float[Array, ""]:
        """Returns the divergence, summed over the tokens of a chunk.

        Args:
          piece: the student's vectors, the teacher's vectors and the mask of the chunk.
          weights: the output embedding of the student.
        """
        ours, theirs, counts = piece
        nats = divergence(logits(ours, weights), logits(theirs, teacher_weights), temperature)
        return jnp.sum(jnp.where(counts, nats, 0.0))

    def add_chunk(total: Array, piece: tuple[Array, Array, Array]) -> tuple[Array, None]:
        """Returns `total` plus the divergence of a chunk, and None.

        `lax.scan` expects the second result as the output of a step. `piece` is as for
        `chunk_divergence`.
        """
        return total + chunk_divergence(piece, student_weights), None

    pieces = tuple(split_chunks(x, chunk) for x in (student, teacher, mask))
    return jax.lax.scan(add_chunk, jnp.zeros((), jnp.float32), pieces)[0]
