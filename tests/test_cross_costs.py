"""Compares computed costs with Table 1 and Figure 5 of the paper on the kind `srformer`.

Also checks the costs with all matrix products, some of which the paper does not count.
"""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools/benchmark"))

import cross_costs as costs  # noqa: E402

from brt.config import CrossAttention, Seq2Seq  # noqa: E402
from brt.models.seq2seq import seq2seq_flops  # noqa: E402

# The keys are (targets, sources, head_dim, segment_size). The numbers are in thousands, those of
# "multiplications" and "memory" as the paper prints them.
ROWS = {
    (128, 1024, 64, 64): {
        "multiplications": (8389, 524, 4719), "memory": (197, 74, 139),
        "real": (16777, 9961, 9961),
    },
    (128, 1024, 64, 16): {
        "multiplications": (8389, 131, 4325), "memory": (197, 68, 330),
        "real": (16777, 21758, 9175),
    },
    (128, 1024, 64, 8): {
        "multiplications": (8389, 66, 4260), "memory": (197, 67, 591),
        "real": (16777, 38404, 9044),
    },
    (1024, 8192, 64, 64): {
        "multiplications": (536871, 4194, 37749), "memory": (8913, 590, 1114),
        "real": (1073742, 79692, 79692),
    },
}  # fmt: skip


@pytest.mark.parametrize("sizes", ROWS, ids=str)
def test_costs_equal_the_papers_table(sizes: tuple) -> None:
    named = dict(zip(("targets", "sources", "head_dim", "segment_size"), sizes, strict=True))
    row, kinds = ROWS[sizes], ("full", "segmented", "srformer")
    for name in ("multiplications", "memory"):
        count = getattr(costs, f"paper_{name}")
        assert tuple(round(count(kind, **named) / 1e3) for kind in kinds) == row[name]
    real = (
        costs.multiplications("full", **named),
        costs.multiplications("srformer", **named, w_on="products"),
        costs.multiplications("srformer", **named),
    )
    assert tuple(round(number / 1e3) for number in real) == row["real"]


def test_savings_equal_those_of_the_paper() -> None:
    paper = {"targets": 128, "sources": 1024, "head_dim": 64}

    def saving(count: object, **sizes: int) -> float:
        return 100 * (1 - count("srformer", **sizes) / count("full", **sizes))

    for size, expected in ((64, 43.8), (16, 48.4), (8, 49.2)):
        found = saving(costs.paper_multiplications, **paper, segment_size=size)
        assert round(found, 1) == expected
    assert round(saving(costs.paper_memory, **paper, segment_size=64), 1) == 29.2
    # The segmented recurrence needs more memory than full attention.
    assert round(saving(costs.paper_memory, **paper, segment_size=8)) == -201
    long = {"targets": 1024, "sources": 8192, "head_dim": 64, "segment_size": 64}
    assert round(saving(costs.paper_multiplications, **long), 1) == 93.0  # Figure 5
    assert round(saving(costs.paper_memory, **long), 1) == 87.5


def test_multiplications_of_a_decoding_step_are_counted() -> None:
    sizes = {"sources": 1024, "head_dim": 64, "segment_size": 64}
    assert costs.step_multiplications("full", **sizes) == 131_072
    assert costs.step_multiplications("srformer", **sizes) == 12_288
    assert costs.step_multiplications("local_global", **sizes) == 2 * (64 + 16) * 64


def test_the_baselines_read_a_wider_window() -> None:
    sizes = {"targets": 128, "sources": 1024, "head_dim": 64, "segment_size": 64}
    segmented = costs.multiplications("segmented", **sizes)
    assert costs.multiplications("xl_memory", **sizes) == 2 * segmented
    assert costs.multiplications("local_global", **sizes) == segmented * (64 + 16) // 64
    recurrent = costs.multiplications("xl_memory", **sizes, heads=8)
    # Two RNNs of 512 features compute two products at each of 1024 positions. 8 heads share this
    # cost.
    assert recurrent - 2 * segmented == 2 * 2 * 1024 * 512 * 512 // 8


@pytest.mark.parametrize("kind", ["segmented", "srformer"])
def test_the_flops_of_models_differ_by_the_costs_of_cross_attention(kind: str) -> None:
    model = Seq2Seq(decoder_layers=3, heads=2, head_dim=8, model_dim=16, vocab_size=100)
    source, target, segment = 64, 32, 16
    full, other = (
        seq2seq_flops(model, CrossAttention(kind=each, segment_size=segment), source, target)
        for each in ("full", kind)
    )
    sizes = {"targets": target, "sources": source, "head_dim": 8, "segment_size": segment}
    saved = costs.multiplications("full", **sizes) - costs.multiplications(kind, **sizes)
    assert full - other == 2 * 3 * 2 * saved
    assert seq2seq_flops(model, CrossAttention(kind="xl_memory"), source, target) is None
