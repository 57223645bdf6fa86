"""Tokens that are not text, and what a decoder reads so as to predict its labels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

IGNORED = -100  # a label that counts for nothing, in data made for Hugging Face


class SpecialTokens(NamedTuple):
    """Ids with a meaning. T5: pad 0, start 0, eos 1. BART: bos 0, pad 1, start 2, eos 2.

    Attributes:
      pad: fills rows up.
      start: what the decoder reads first.
      eos: ends sources and targets.
      bos: begins sources and targets; None: nothing does.
      forced_bos, forced_eos: what generation writes first, and last where it is cut; None: free.
    """

    pad: int
    start: int
    eos: int
    bos: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None


def shift_right(
    labels: Int[Array | np.ndarray, "B T"], special: SpecialTokens
) -> Int[np.ndarray, "B T"]:
    """What the decoder reads so as to predict `labels`: the start, then all but the last.

    T5's labels are `... </s>`, BART's `<s> ... </s>`; what is ignored is read as padding.
    """
    labels = np.asarray(labels)
    start = np.full_like(labels[:, :1], special.start)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, special.pad, shifted)
