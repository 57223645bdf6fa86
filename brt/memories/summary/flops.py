"""FLOPs of summary layers (see `layer.py`), computed from the sizes of the model."""

from brt.config import Model
from brt.layers.flops import window_flops
from brt.memories.summary.section import Summaries


def summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer with a short-term memory.

    The count is that of a sliding-window layer, in which attention to the window is replaced by
    attention to the block and to the short-term memory. Two numbers are added: the FLOPs of reading
    the summaries of the layer below, which are processed like tokens, and the FLOPs of the weighted
    sums that become the next memory and the summaries for the layer above.
    """
    section = model.of(Summaries)
    m, width, places = (
        model,
        model.heads * model.head_dim,
        model.window + section.summaries,
    )
    projection, attention = 2 * m.model_dim * width, 4 * width
    dense = 4 * projection + 4 * m.model_dim * m.mlp_dim
    # A block has `places` tokens and summaries. `keys` is the number of keys that each of them
    # attends to, on average.
    keys = section.short_memory + places // 2
    mixes = 2 * m.model_dim * (section.short_memory + section.summaries)
    block = section.summaries * dense + places * (attention * keys + mixes)
    extra = (block + section.short_memory * 2 * projection) // m.window
    return window_flops(m) + extra - attention * m.window


def long_summary_flops(model: Model) -> int:
    """Returns the FLOPs per token of a layer that also has a long-term memory.

    The projection of the long-term memory to keys and values at the start of a segment is not
    counted, because it is computed only once per segment.
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
