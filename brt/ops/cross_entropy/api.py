"""Cross-entropy loss and token scores over a vocabulary, without storing all logits at once.

In shapes, D is the size of a token's vector, and V the number of tokens of the vocabulary. The
logits are soft_capped(scale * hidden @ embedding.T) + bias (`softmax.soft_capped`). At most `chunk`
tokens of a row have logits at once on a device; the TPU kernels ignore this number.
"""

from jaxtyping import Array, Bool, Float, Int

from brt.ops import dispatch
from brt.ops.cross_entropy import pallas_tpu, reference, xla, xla_cpu
from brt.ops.cross_entropy.chunks import Targets, TokenScores
from brt.ops.dispatch import Implementation, Op

SCORES = Op(
    "token_scores",
    (
        Implementation("pallas_tpu", pallas_tpu.token_scores, pallas_tpu.refusal),
        Implementation("xla_cpu", xla_cpu.token_scores, xla_cpu.refusal),
        Implementation("xla", xla.token_scores),
        Implementation("pallas_interpret", pallas_tpu.interpreted_scores, pallas_tpu.form_refusal),
        Implementation("reference", reference.token_scores),
    ),
)
LOSS = Op(
    "cross_entropy",
    (
        Implementation("pallas_tpu", pallas_tpu.cross_entropy, pallas_tpu.refusal),
        Implementation("xla", xla.cross_entropy),
        Implementation("pallas_interpret", pallas_tpu.interpreted, pallas_tpu.form_refusal),
        Implementation("reference", reference.cross_entropy),
    ),
)


def token_scores(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    soft_cap: float = 0.0,
    chunk: int,
    implementation: str | None = None,
) -> TokenScores:
    """Returns the scores of the targets, for evaluation; there are no gradients."""
    inputs = Targets(hidden, embedding, targets, bias)
    options = {"scale": scale, "chunk": chunk} | ({"soft_cap": soft_cap} if soft_cap else {})
    return dispatch.run(SCORES, implementation, inputs, **options)


def cross_entropy(
    hidden: Float[Array, "B T D"],
    embedding: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    bias: Float[Array, " V"] | None = None,
    *,
    scale: float,
    soft_cap: float = 0.0,
    chunk: int,
    smoothing: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns two sums, in nats, of the cross-entropy of the targets where `mask` is True.

    The first sum has label smoothing (Szegedy et al. 2016, section 7): the fraction `smoothing` of
    each target's probability is distributed evenly over all tokens. The second sum has no label
    smoothing and no gradient.
    """
    inputs = Targets(hidden, embedding, targets, bias, mask)
    options = {"scale": scale, "chunk": chunk, "smoothing": smoothing}
    options |= {"soft_cap": soft_cap} if soft_cap else {}
    return dispatch.run(LOSS, implementation, inputs, **options)
