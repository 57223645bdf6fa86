"""What made-up data of all kinds share: their names, and randomness that never changes."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from brt.config.fields import MADE_UP
from brt.errors import DataError

PREFIX = MADE_UP


class Name(NamedTuple):
    """`generated:NAME/COUNT`."""

    name: str
    size: int


def parse(source: str) -> Name:
    """Raises DataError where a source is not generated:NAME/COUNT."""
    name, _, count = source.removeprefix(PREFIX).rpartition("/")
    if not name or not count.isdecimal() or not int(count):
        raise DataError(f"{source} must be generated:NAME/COUNT, as generated:train/1000")
    return Name(name, int(count))


def read(
    sources: Iterable[str],
    made: Callable[[str], Iterable[Any]],
    files: Callable[[list[str]], Iterable[Any]],
) -> Iterator[Any]:
    """What sources hold, in order: those that are made up, and files."""
    for own, names in itertools.groupby(sources, lambda name: name.startswith(PREFIX)):
        if own:
            yield from itertools.chain.from_iterable(map(made, names))
        else:
            yield from files(list(names))


def draw(purpose: str) -> np.random.RandomState:
    """NumPy promises that this stream never changes; that of its newer generators may."""
    seed = hashlib.sha256(purpose.encode()).digest()[:4]
    return np.random.RandomState(int.from_bytes(seed, "little"))


def words(purpose: str, count: int) -> list[str]:
    """Words of two or three syllables, none twice, and none that another begins with."""
    random, found = draw(purpose), []
    while len(found) < count:
        size = random.randint(2, 4)
        word = "".join("bdfgklmnprstvz"[random.randint(14)] + "aeiou"[random.randint(5)]
                       for _ in range(size))  # fmt: skip
        if not any(word.startswith(other) or other.startswith(word) for other in found):
            found.append(word)
    return found
