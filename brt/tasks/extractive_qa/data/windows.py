"""Parts of a long text that overlap, and where characters of it are among its tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Window(NamedTuple):
    """Tokens of a text from `start` to before `stop`."""

    start: int
    stop: int


def windows(length: int, room: int, stride: int) -> list[Window]:
    """Windows of `room` tokens at most, that share `stride` with the one before; all of a text.

    A short text has one, and so has an empty one. `stride` is below `room`.
    """
    found = [Window(0, min(room, length))]
    while found[-1].stop < length:
        start = found[-1].start + room - stride
        found.append(Window(start, min(start + room, length)))
    return found


def tokens_of(spans: Int[np.ndarray, "T 2"], start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last token with a character from `start` to before `stop`."""
    (there,) = np.nonzero((spans[:, 0] < stop) & (spans[:, 1] > start))
    return (int(there[0]), int(there[-1])) if len(there) else None
