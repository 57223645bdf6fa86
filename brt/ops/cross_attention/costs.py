"""Costs of cross-attention for one head: multiplications, and numbers that are stored.

They are counted as in the paper (Table 1, Figure 5), and as the matrix products really are. The
paper omits the product of softmax weights and values, W, and Q R.
"""

from typing import Literal

PaperKind = Literal["full", "segmented", "srformer"]
Kind = Literal["full", "segmented", "srformer", "xl_memory", "local_global"]


def paper_multiplications(
    kind: PaperKind, *, targets: int, sources: int, head_dim: int, segment_size: int
) -> int:
    """Returns qkd, qsd, or qsd + kd^2 for q target positions and k source positions."""
    q, k, d, s = targets, sources, head_dim, segment_size
    return {"full": q * k * d, "segmented": q * s * d, "srformer": q * s * d + k * d**2}[kind]


def paper_memory(
    kind: PaperKind, *, targets: int, sources: int, head_dim: int, segment_size: int
) -> int:
    """Returns the numbers stored: qk + kd, qs + kd, or qs + kd + md^2."""
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
    """Returns the multiplications of all matrix products of one pass over all targets.

    Args:
      kind: the kind of cross-attention.
      targets: target positions.
      sources: source positions.
      head_dim: the size of a head.
      segment_size: source positions of a segment.
      w_on: what W is applied to: the values (kd^2, as in brt), or every P (md^3, as in the paper).
      heads: for `xl_memory`, the heads that its RNN mixes; 0 for a memory without an RNN.
    """
    q, k, d, s = targets, sources, head_dim, segment_size
    segments = -(-k // s)
    if kind == "srformer":
        w = k * d**2 if w_on == "values" else segments * d**3
        return 2 * q * s * d + k * d**2 + w + q * d**2
    window = {"full": k, "segmented": s, "xl_memory": 2 * s, "local_global": s + segments}[kind]
    # There are two RNNs with two products each.
    recurrent = 4 * heads * k * d**2 if kind == "xl_memory" else 0
    return 2 * q * window * d + recurrent


def step_multiplications(kind: Kind, *, sources: int, head_dim: int, segment_size: int) -> int:
    """Returns the multiplications of one target position with a cache (a table of states)."""
    if kind == "srformer":
        return 2 * segment_size * head_dim + head_dim**2
    return multiplications(
        kind, targets=1, sources=sources, head_dim=head_dim, segment_size=segment_size
    )
