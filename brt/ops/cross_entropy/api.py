"""Which implementation scores tokens against a vocabulary, and which makes a loss of them."""

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.cross_entropy import pallas_tpu, reference, xla
from brt.ops.cross_entropy.scored import Scored
from brt.ops.dispatch import Implementation, Op

SCORES = Op(
    "token_scores",
    (
        Implementation("pallas_tpu", pallas_tpu.token_scores, ("tpu",), ("tpu",),
                       pallas_tpu.refuses),
        Implementation("xla", xla.token_scores),
        Implementation("pallas_interpret", pallas_tpu.interpreted_scores, (),
                       refusal=pallas_tpu.refuses_bias),
        Implementation("reference", reference.token_scores, auto=()),
    ),
)  # fmt: skip
LOSS = Op(
    "cross_entropy",
    (
        Implementation("pallas_tpu", pallas_tpu.cross_entropy, ("tpu",), ("tpu",),
                       pallas_tpu.refuses),
        Implementation("xla", xla.cross_entropy),
        Implementation("pallas_interpret", pallas_tpu.interpreted, (),
                       refusal=pallas_tpu.refuses_bias),
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
) -> Scored:
    """How probable each target is, of logits scale * hidden @ embedding.T + bias. For evaluation:
    not made for gradients.

    Args:
      chunk: at most so many tokens of a lane have logits at a time; a kernel chooses itself.
      implementation: a named one runs or raises; None takes the best that can.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
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
    """The cross-entropy of tokens, with smoothed labels (Szegedy et al. 2016, section 7).

    Args:
      hidden: logits are scale * hidden @ embedding.T + bias.
      mask: False where a target does not count.
      bias: float32; None: none.
      chunk: at most so many tokens of a lane have logits at a time; a kernel chooses itself.
      smoothing: the share of each target's probability that all tokens divide equally.
      implementation: a named one runs or raises; None takes the best that can.

    Returns:
      The summed loss, and the summed nats of the targets alone, which have no gradient; float32.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(
        LOSS, implementation, hidden, embedding, targets, mask, bias,
        scale=scale, chunk=chunk, smoothing=smoothing,
    )  # fmt: skip
