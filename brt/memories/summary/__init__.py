"""Layers that compute a few vectors as a summary of every block, for the layer above and for the
next block (MELODI, arXiv 2410.03156).

Layers of the kind "long_summary" also collect vectors of many blocks in a long-term memory.
"""

from brt.layers.kinds import LayerKind, register_kind
from brt.memories.summary.flops import long_summary_flops, summary_flops
from brt.memories.summary.layer import LongSummaryLayer, SummaryLayer
from brt.memories.summary.section import Summaries as Summaries
from brt.memories.summary.state import (
    LONG_SUMMARY_AXES,
    SUMMARY_AXES,
    new_long_summary_state,
    new_summary_state,
    number_of_summaries,
)

register_kind(
    "summary",
    LayerKind(
        SummaryLayer,
        new_summary_state,
        lambda model: SUMMARY_AXES,
        {"state": ("vectors", "valid")},
        summary_flops,
        Summaries,
        loops=True,
        summaries=number_of_summaries,
    ),
)
register_kind(
    "long_summary",
    LayerKind(
        LongSummaryLayer,
        new_long_summary_state,
        lambda model: LONG_SUMMARY_AXES,
        {"state": ("short",), "memory": ("vectors", "length")},
        long_summary_flops,
        Summaries,
        loops=True,
        summaries=number_of_summaries,
    ),
)
