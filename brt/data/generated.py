"""Helpers for generated data: names of generated sources, and reproducible random numbers.

Tests and quickstarts use generated data instead of files. The name of a source determines the data.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from brt.config.fields import GENERATED
from brt.errors import DataError

PREFIX = GENERATED


class Name(NamedTuple):
    """The parts of the name of a generated source, `generated:NAME/SIZE`, which has SIZE items."""

    name: str
    size: int


def parse(source: str) -> Name:
    """Returns the parts of a name such as "generated:train/1000"."""
    name, _, count = source.removeprefix(PREFIX).rpartition("/")
    if not name or not count.isdecimal() or not int(count):
        raise DataError(f"{source} must be generated:NAME/COUNT, such as generated:train/1000")
    return Name(name, int(count))


def digest(source: str, kind: str) -> str:
    """Returns a hash that identifies the content of a source, in place of a file's hash.

    `kind` names the kind of data and the version of this kind. Each item depends only on the kind,
    the name of its source and its index. A longer source therefore begins with the items of a
    shorter one, and both have the same hash. The number of items is recorded as a part of the
    source's name.
    """
    return hashlib.sha256(f"{kind} {parse(source).name}".encode()).hexdigest()


def read(
    sources: Iterable[str],
    generate: Callable[[str], Iterable[Any]],
    files: Callable[[list[str]], Iterable[Any]],
) -> Iterator[Any]:
    """Yields the items of sources in order.

    `generate` returns the items of one generated source, and `files` returns the items of a list of
    other sources.
    """
    for is_generated, names in itertools.groupby(sources, lambda name: name.startswith(PREFIX)):
        if is_generated:
            yield from itertools.chain.from_iterable(map(generate, names))
        else:
            yield from files(list(names))


def draw(purpose: str) -> np.random.RandomState:
    """Returns a random number generator whose seed is a hash of the text `purpose`."""
    # NumPy guarantees that the numbers of a RandomState, unlike those of newer generators, are the
    # same in all versions.
    seed = hashlib.sha256(purpose.encode()).digest()[:4]
    return np.random.RandomState(int.from_bytes(seed, "little"))


def words(purpose: str, count: int) -> list[str]:
    """Returns `count` different words of two or three syllables; no word is a prefix of another."""
    random, result = draw(purpose), []
    while len(result) < count:
        size = random.randint(2, 4)
        word = "".join("bdfgklmnprstvz"[random.randint(14)] + "aeiou"[random.randint(5)]
                       for _ in range(size))  # fmt: skip
        if not any(word.startswith(other) or other.startswith(word) for other in result):
            result.append(word)
    return result
