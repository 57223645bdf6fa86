"""Costs of cross-attention for one head: multiplications, and numbers that are stored.

The functions `paper_...` count as the paper does (Table 1, Figure 5). The others count all matrix
products but projections. The paper omits the product of softmax weights and values, the product
with the weights W of the recurrence, and the product of queries and states Q R. In formulas, q is
the number of target positions, k of source positions, d the size of a head, s that of a segment.
"""

from typing import Literal

PaperKind = Literal["full", "segmented", "srformer"]
Kind = Literal["full", "segmented", "srformer", "xl_memory", "local_global"]


def paper_multiplications(
    kind: PaperKind, *, targets: int, sources: int, head_dim: int, segment_size: int
) -> int:
    q, k, d, s = targets, sources, head_dim, segment_size
    return {"full": q * k * d, "segmented": q * s * d, "srformer": q * s * d + k * d**2}[kind]


def paper_memory(
    kind: PaperKind, *, targets: int, sources: int, head_dim: int, segment_size: int
) -> int:
    q, k, d, s = targets, sources, head_dim, segment_size
    segments = -(-k // s)
    return {
        "full": q * k + k * d,
        "segmented": q * s + k * d,
        "srformer": q * s + k * d + segments * d**2,
    }[kind]


def multiplications(
    kind: Kind,
    *,
    targets: int,
    sources: int,
    head_dim: int,
    segment_size: int,
    w_on: Literal["values", "products"] = "values",
    heads: int = 0,
) -> int:
    """Returns the number of multiplications of one head, for all target positions.

    `w_on` says with what `srformer` multiplies W: the values (kd^2 multiplications, as in brt), or
    the products of keys and values of each of m segments (md^3, as in the paper). `heads` adds the
    RNNs of `xl_memory`, which read all heads as one vector; 0 leaves them out.
    """
    q, k, d, s = targets, sources, head_dim, segment_size
    segments = -(-k // s)
    if kind == "srformer":
        w = k * d**2 if w_on == "values" else segments * d**3
        return 2 * q * s * d + k * d**2 + w + q * d**2
    window = {"full": k, "segmented": s, "xl_memory": 2 * s, "local_global": s + segments}[kind]
    # There is an RNN for the keys and another one for the values. Each RNN computes two products of
    # a vector of heads * d numbers and a matrix for each position. Such a product has heads * d**2
    # multiplications for each head.
    recurrent = 4 * heads * k * d**2 if kind == "xl_memory" else 0
    return 2 * q * window * d + recurrent


def step_multiplications(kind: Kind, *, sources: int, head_dim: int, segment_size: int) -> int:
    """Returns the number of multiplications of one head for one target position in decoding.

    The states of recurrences and RNNs are in a cache and not counted.
    """
    if kind == "srformer":
        return 2 * segment_size * head_dim + head_dim**2
    return multiplications(
        kind, targets=1, sources=sources, head_dim=head_dim, segment_size=segment_size
    )
