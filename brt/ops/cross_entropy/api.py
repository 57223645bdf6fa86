"""Cross-entropy loss and token scores over a vocabulary, without storing all logits at once.

This module selects the implementation. In shapes, B is the number of rows of the batch, T of tokens
of a row, D of numbers of a token's vector, and V of tokens of the vocabulary.
"""

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.cross_entropy import pallas_tpu, reference, xla, xla_cpu
from brt.ops.cross_entropy.scored import TokenScores
from brt.ops.dispatch import Implementation, Op

SCORES = Op(
    "token_scores",
    (
        Implementation("pallas_tpu", pallas_tpu.token_scores, ("tpu",), ("tpu",),
                       pallas_tpu.refusal),
        Implementation("xla_cpu", xla_cpu.token_scores, auto=("cpu",), refusal=xla_cpu.refusal),
        Implementation("xla", xla.token_scores),
        Implementation("pallas_interpret", pallas_tpu.interpreted_scores, (),
                       refusal=pallas_tpu.bias_refusal),
        Implementation("reference", reference.token_scores, auto=()),
    ),
)  # fmt: skip
LOSS = Op(
    "cross_entropy",
    (
        Implementation("pallas_tpu", pallas_tpu.cross_entropy, ("tpu",), ("tpu",),
                       pallas_tpu.refusal),
        Implementation("xla", xla.cross_entropy),
        Implementation("pallas_interpret", pallas_tpu.interpreted, (),
                       refusal=pallas_tpu.bias_refusal),
        Implementation("reference", reference.cross_entropy, auto=()),
    ),
)  # fmt: skip


def token_scores(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    chunk: int,
    implementation: str | None = None,
) -> TokenScores:
    """Returns the negative log probability of each target, and whether the target is the most
    probable token.

    The function is for evaluation only and has no gradients.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the token to score at each position.
      bias: a bias of the logits, or None.
      scale: factor of the logits.
      chunk: the largest number of tokens of a row whose logits exist at once on a device. The TPU
        kernels ignore this number.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(
        SCORES, implementation, hidden, embedding, targets, bias, scale=scale, chunk=chunk
    )


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    chunk: int,
    smoothing: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the summed cross-entropy of the targets, with label smoothing (Szegedy et al. 2016,
    section 7) and without.

    Args:
      hidden: the vectors of the tokens; the logits are scale * hidden @ embedding.T + bias.
      embedding: the embeddings of the vocabulary.
      targets: the target of each position.
      mask: False where a target does not count.
      bias: float32, a bias of the logits, or None.
      scale: factor of the logits.
      chunk: the largest number of tokens of a row whose logits exist at once on a device. The TPU
        kernels ignore this number.
      smoothing: the fraction of each target's probability that is distributed evenly over all
        tokens.
      implementation: the name of an implementation; None selects the best one that supports the
        inputs.

    Returns:
      The sum with label smoothing, which is the loss; and the sum without, which is the sum of the
        targets' negative log probabilities in nats and has no gradient. Both are float32 scalars.

    Raises:
      NotImplementedError: the implementation does not exist or does not support the inputs.
    """
    return dispatch.run(
        LOSS, implementation, hidden, embedding, targets, mask, bias,
        scale=scale, chunk=chunk, smoothing=smoothing,
    )  # fmt: skip
