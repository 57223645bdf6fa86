"""Cuts a long text into overlapping windows, and converts ranges of characters to tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Window(NamedTuple):
    """A range of tokens of a text: the tokens with the indices `start` to `stop` - 1."""

    start: int
    stop: int


def windows(length: int, size: int, overlap: int) -> list[Window]:
    """Returns windows of at most `size` tokens that cover a text and share `overlap` tokens.

    An empty text has one empty window. The overlap is less than `size`.
    """
    cuts = [Window(0, min(size, length))]
    while cuts[-1].stop < length:
        start = cuts[-1].start + size - overlap
        cuts.append(Window(start, min(start + size, length)))
    return cuts


def token_range(spans: Int[np.ndarray, "T 2"], start: int, stop: int) -> tuple[int, int] | None:
    """Returns the indices of the first and last token that overlap a range of characters; None if
    no token does.

    `stop` is the character after the last one, as is the second column of `spans`.
    """
    (tokens,) = np.nonzero((spans[:, 0] < stop) & (spans[:, 1] > start))
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None
