"""What a search writes, and how texts of different lengths are compared."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from brt.config import Decoding


class Hypotheses(NamedTuple):
    """N texts for each of B sources, best first.

    Attributes:
      sequences: int32 [B, N, L], from the start token to the end, then padding.
      lengths: int32 [B, N], tokens before the padding; 1 where there is no such text.
      scores: float32 [B, N], the sum of log probabilities over the length penalty; -inf where
        there are fewer than N possible texts, NaN for all of a source whose logits were NaN.
    """

    sequences: Int[Array, "B N L"]
    lengths: Int[Array, "B N"]
    scores: Float[Array, "B N"]


def length_penalties(decoding: Decoding) -> Float[np.ndarray, " L"]:
    """What a sum of log probabilities is divided by, by the number of written tokens; float32.

    `hf`: n ** p; `t5x`: ((5 + n) / 6) ** p (Wu et al. 2016, equation 14). Entry 0 is unused.
    """
    written = np.arange(decoding.max_length, dtype=np.float64)
    written[0] = 1
    base = written if decoding.penalty == "hf" else (5 + written) / 6
    return (base**decoding.length_penalty).astype(np.float32)
