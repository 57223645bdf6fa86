"""Special tokens of encoder-decoders, and the computation of the decoder's inputs from its labels.

In shapes, B is the number of targets and T their padded number of tokens.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

IGNORED = -100  # The loss ignores tokens with this label, as in Hugging Face datasets.


class SpecialTokens(NamedTuple):
    """Token ids with a special meaning.

    In T5, pad and start are 0, and eos is 1. In BART, bos is 0, pad is 1, and start and eos are 2.

    Attributes:
      pad: the id that fills rows of a batch up to their common length.
      start: the first input of the decoder.
      eos: the id at the end of sources and targets.
      bos: the id at the beginning of sources and targets; None if they have none.
      forced_bos: the id that generation must write first; None for a free choice.
      forced_eos: the id that generation must write at the maximum length; None for a free choice.
      ends: further ids that end a generated text, as `eos` does.
    """

    pad: int
    start: int
    eos: int
    bos: int | None = None
    forced_bos: int | None = None
    forced_eos: int | None = None
    ends: tuple[int, ...] = ()

    @property
    def stops(self) -> Int[np.ndarray, " E"]:
        """All ids that end a generated text."""
        return np.array((self.eos, *self.ends), np.int32)


def shift_right(
    labels: Int[Array | np.ndarray, "B T"], special: SpecialTokens
) -> Int[np.ndarray, "B T"]:
    """Returns the decoder's input ids for `labels`: the start token, followed by all labels except
    the last.

    Labels are the ids that the decoder has to predict: `... </s>` for T5, and `<s> ... </s>` for
    BART. Labels that the loss ignores (`IGNORED`) become padding. `special` has the ids of the
    start token and of padding.
    """
    labels = np.asarray(labels)
    start = np.full_like(labels[:, :1], special.start)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, special.pad, shifted)
