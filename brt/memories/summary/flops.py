"""FLOPs of summary layers, computed from the sizes of the model."""

from brt.config import Model
from brt.layers.flops import window_flops
from brt.memories.summary.section import Summaries


def summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer with a short-term memory.

    The count starts from a sliding-window layer, and replaces its attention to a window by
    attention to the block and to the short-term memory. It adds the summaries, which are processed
    like tokens, and the mixtures: the weighted sums of memory and summaries that become the new
    memory.
    """
    section = model.of(Summaries)
    m, width, places = (
        model,
        model.heads * model.head_dim,
        model.window + section.summaries,
    )
    projection, attention = 2 * m.model_dim * width, 4 * width
    dense = 4 * projection + 4 * m.model_dim * m.mlp_dim
    # `keys` is the number of keys that a place sees, averaged over the places of a block.
    keys = section.short_memory + places // 2
    mixes = 2 * m.model_dim * (section.short_memory + section.summaries)
    block = section.summaries * dense + places * (attention * keys + mixes)
    extra = (block + section.short_memory * 2 * projection) // m.window
    return window_flops(m) + extra - attention * m.window


def long_summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer with a short-term and a long-term memory.

    The keys of the long-term memory at the start of a segment are not counted, because they are
    computed only once per segment.
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
