"""Results of a search, and the length penalty that makes texts of different lengths comparable.

In shapes, B is the number of sources (inputs of the model, such as documents to summarise), N the
number of texts of each source, and L the maximum number of tokens of a text, including the start
token.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from brt.config import Decoding


class Hypotheses(NamedTuple):
    """N texts of each of B sources, best first. Texts are missing if a search found fewer."""

    sequences: Int[Array, "B N L"]  # from the start token to the end, then padding
    lengths: Int[Array, "B N"]  # number of tokens before the padding; 1 for missing texts
    # Summed log probabilities divided by the length penalty; -inf for missing texts, NaN for all
    # texts of a source whose logits were NaN.
    scores: Float[Array, "B N"]


def length_penalties(decoding: Decoding) -> Float[np.ndarray, " L"]:
    """Returns the length penalty for each number of written tokens, float32 [L].

    Summed log probabilities are divided by the length penalty. Entry n is the penalty of a text of
    n tokens without the start token. It is n ** p if `decoding.penalty` is "hf", and
    ((5 + n) / 6) ** p if it is "t5x" (Wu et al. 2016, equation 14), where p is
    `decoding.length_penalty`. Entry 0 is not used.
    """
    written = np.arange(decoding.max_length, dtype=np.float64)
    written[0] = 1
    base = written if decoding.penalty == "hf" else (5 + written) / 6
    return (base**decoding.length_penalty).astype(np.float32)
