"""FLOPs of summary layers, counted from their sizes."""

from brt.config import Model
from brt.memories.summary.section import Summaries


def summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of summaries and mixtures, minus the keys that a window has in
    addition.
    """
    section = model.of(Summaries)
    m, width, places = (
        model,
        model.heads * model.head_dim,
        model.window + section.summaries,
    )
    projection, attention = 2 * m.model_dim * width, 4 * width
    dense = 4 * projection + 4 * m.model_dim * m.mlp_dim
    keys = section.short_memory + places // 2  # The mean over the places of a block.
    mixes = 2 * m.model_dim * (section.short_memory + section.summaries)
    block = section.summaries * dense + places * (attention * keys + mixes)
    return (block + section.short_memory * 2 * projection) // m.window - attention * m.window


def long_summary_flops(model: Model) -> int:
    """Returns the same with the long-term memory, without its keys, which are computed once per
    segment.
    """
    section = model.of(Summaries)
    m, width, places = (
        model,
        model.heads * model.head_dim,
        model.window + section.summaries,
    )
    reading = 4 * width * section.long_memory + 2 * m.model_dim * section.long_increment
    new_keys = 4 * m.model_dim * width * section.long_increment
    return summary_flops(m) + (places * reading + new_keys) // m.window
