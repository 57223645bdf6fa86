"""What becomes of rows that cannot be used."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from brt.errors import DataError

SHOWN = 3  # bad rows that a sentence names
KEPT = 20  # bad rows that a manifest names


class BadRow(NamedTuple):
    """A row that holds nothing usable, and why, as "has an empty summary"."""

    name: str
    problem: str


class Tally:
    """Counts rows as they pass, and takes the bad ones out.

    Attributes:
      rows: that passed.
      bad: those of them that were taken out.

    Args:
      skip: what the user sets to go on without bad rows, as "Pairs.errors = 'skip'".
      progress: called for each row.
    """

    def __init__(self, split: str, skip: str, progress: Callable[[], Any] = lambda: None):
        self.rows = self.bad = 0
        self._split, self._skip, self._progress = split, skip, progress
        self._bad: list[str] = []  # the first ones

    def usable(self, found: Iterable[Any]) -> Iterator[Any]:
        """What is no BadRow."""
        for item in found:
            self.rows += 1
            self._progress()
            if not isinstance(item, BadRow):
                yield item
                continue
            self.bad += 1
            if len(self._bad) < KEPT:
                self._bad.append(f"{item.name} {item.problem}")

    def settled(self, found: Iterable[Any], errors: str) -> Iterator[Any]:
        """The same; raises DataError behind the last row if all were bad, or, where `errors` is
        "refuse", any.
        """
        yield from self.usable(found)
        if self.bad == self.rows:
            raise DataError(f"{self.described()}; mend them, or name other files or columns")
        if self.bad and errors == "refuse":
            raise DataError(
                f"{self.described()}; mend them, or go on without them with {self._skip}"
            )

    def described(self) -> str:
        """How many rows were bad, and the first of them."""
        more = f" and {self.bad - SHOWN:,} more" if self.bad > SHOWN else ""
        return (
            f"{self.bad:,} of {self.rows:,} rows of {self._split} cannot be used: "
            f"{', '.join(self._bad[:SHOWN])}{more}"
        )

    def report(self) -> dict[str, Any]:
        """The same for a manifest."""
        return {"rows": self.rows, "bad": self.bad, "first": self._bad}
