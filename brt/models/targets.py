"""Special tokens of encoder-decoders, and the decoder's inputs, computed from its labels."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Int

IGNORED = -100  # The loss ignores tokens with this label, as in Hugging Face datasets.


class SpecialTokens(NamedTuple):
    """Token ids. In T5, pad and start are 0, and eos is 1. In BART, bos is 0, pad is 1, and start
    and eos are 2.
    """

    pad: int
    start: int  # The first input of the decoder.
    eos: int  # At the end of sources and targets.
    bos: int | None = None  # At the beginning of sources and targets, if they have one.
    forced_bos: int | None = None  # Generation must write this id first.
    forced_eos: int | None = None  # Generation must write this id at the maximum length.
    ends: tuple[int, ...] = ()  # Further ids that end a generated text, as `eos` does.

    @property
    def stops(self) -> Int[np.ndarray, " E"]:
        return np.array((self.eos, *self.ends), np.int32)


def shift_right(
    labels: Int[Array | np.ndarray, "B T"], special: SpecialTokens
) -> Int[np.ndarray, "B T"]:
    """Returns the start token, followed by all labels (which the decoder has to predict: `... </s>`
    for T5, `<s> ... </s>` for BART) except the last. Ignored labels become padding.
    """
    labels = np.asarray(labels)
    start = np.full_like(labels[:, :1], special.start)
    shifted = np.concatenate([start, labels[:, :-1]], axis=1)
    return np.where(shifted == IGNORED, special.pad, shifted)
