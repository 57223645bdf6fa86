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
    """The parts of the name of a generated source, `generated:NAME/COUNT`.

    Attributes:
      name: NAME, which determines the generated items.
      size: COUNT, the number of items that the source generates.
    """

    name: str
    size: int


def parse(source: str) -> Name:
    """Returns the parts of the name of a generated source.

    Args:
      source: the name, such as "generated:train/1000".

    Raises:
      DataError: the name does not have the form generated:NAME/COUNT.
    """
    name, _, count = source.removeprefix(PREFIX).rpartition("/")
    if not name or not count.isdecimal() or not int(count):
        raise DataError(f"{source} must be generated:NAME/COUNT, such as generated:train/1000")
    return Name(name, int(count))


def read(
    sources: Iterable[str],
    generate: Callable[[str], Iterable[Any]],
    files: Callable[[list[str]], Iterable[Any]],
) -> Iterator[Any]:
    """Yields the items (rows or documents) of generated sources and of files, in order.

    Args:
      sources: names of generated sources and of files.
      generate: function from the name of a generated source to the source's items.
      files: function from the names of several files to the files' items.
    """
    for is_generated, names in itertools.groupby(sources, lambda name: name.startswith(PREFIX)):
        if is_generated:
            yield from itertools.chain.from_iterable(map(generate, names))
        else:
            yield from files(list(names))


def draw(purpose: str) -> np.random.RandomState:
    """Returns a random number generator whose seed is a hash of the text `purpose`.

    The generator is a RandomState, because NumPy guarantees that the numbers of a RandomState are
    the same in all versions. For newer generators there is no such guarantee.
    """
    seed = hashlib.sha256(purpose.encode()).digest()[:4]
    return np.random.RandomState(int.from_bytes(seed, "little"))


def words(purpose: str, count: int) -> list[str]:
    """Returns `count` different words of two or three syllables; no word is a prefix of another.

    Args:
      purpose: a text that determines the words.
      count: the number of words.
    """
    random, result = draw(purpose), []
    while len(result) < count:
        size = random.randint(2, 4)
        word = "".join("bdfgklmnprstvz"[random.randint(14)] + "aeiou"[random.randint(5)]
                       for _ in range(size))  # fmt: skip
        if not any(word.startswith(other) or other.startswith(word) for other in result):
            result.append(word)
    return result
