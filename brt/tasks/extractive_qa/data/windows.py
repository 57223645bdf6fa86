"""Overlapping windows of a long text, and the tokens of a range of characters."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Window(NamedTuple):
    """The tokens `start` to `stop` - 1 of a text."""

    start: int
    stop: int


def windows(length: int, room: int, stride: int) -> list[Window]:
    """Cuts a text into windows of at most `room` tokens that overlap by `stride` tokens.

    An empty text has one window, too. `stride` must be less than `room`.
    """
    cuts = [Window(0, min(room, length))]
    while cuts[-1].stop < length:
        start = cuts[-1].start + room - stride
        cuts.append(Window(start, min(start + room, length)))
    return cuts


def token_range(spans: Int[np.ndarray, "T 2"], start: int, stop: int) -> tuple[int, int] | None:
    """Returns the first and last token that overlap characters `start` to `stop` - 1, or None."""
    (tokens,) = np.nonzero((spans[:, 0] < stop) & (spans[:, 1] > start))
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else None
