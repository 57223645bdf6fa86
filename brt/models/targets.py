"""Special tokens, and the decoder's input for given labels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

IGNORED = -100  # Tokens with this label have no loss, as in Hugging Face datasets.


class SpecialTokens(NamedTuple):
    """Token ids with a special meaning. T5: pad 0, start 0, eos 1. BART: bos 0, pad 1, start 2, eos
    2.

    Attributes:
      pad: fills rows.
      start: the first input of the decoder.
      eos: ends sources and targets.
      bos: begins sources and targets, or None.
      forced_bos, forced_eos: tokens that generation must write first, and last if it is cut, or
        None.
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
    """Returns the decoder's input for `labels`: the start token, followed by all labels except the
    last.

    Labels of T5 are `... </s>`, and labels of BART are `<s> ... </s>`. Labels that the loss ignores
    become padding. `special` has the ids of the start token and of padding.
    """
    labels = np.asarray(labels)
    start = np.full_like(labels[:, :1], special.start)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, special.pad, shifted)
