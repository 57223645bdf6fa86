"""Which implementation multiplies hidden vectors by the vocabulary's."""

from jaxtyping import Array, Float, Int

from brt.ops import dispatch
from brt.ops.dispatch import Implementation, Op
from brt.ops.token_logits import pallas_tpu, reference, xla
from brt.ops.token_logits.scored import Scored

OP = Op(
    "token_logits",
    (
        Implementation("pallas_tpu", pallas_tpu.token_logits, ("tpu",), ("tpu",),
                       pallas_tpu.refuses),
        Implementation("xla", xla.token_logits),
        Implementation("pallas_interpret", pallas_tpu.interpreted, auto=()),
        Implementation("reference", reference.token_logits, auto=()),
    ),
)  # fmt: skip


def token_logits(
    hidden: Float[Array, "B C D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B C"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    implementation: str | None = None,
) -> Scored:
    """scale * hidden @ embedding.T + bias, and of each row its log-sum-exp and its target's nats.

    Args:
      implementation: a named one runs or raises; None takes the best that can.

    Raises:
      NotImplementedError: an implementation that does not exist, or not for these inputs.
    """
    return dispatch.run(OP, implementation, hidden, embedding, targets, bias, scale=scale)
