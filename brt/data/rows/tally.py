"""Counts rows that cannot be used, and either refuses or skips them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from brt.errors import DataError

SHOWN = 3  # The number of bad rows that an error message lists.
KEPT = 20  # The number of bad rows that a manifest lists.


class BadRow(NamedTuple):
    """The name of a row that cannot be used, and the problem, such as "has an empty summary"."""

    name: str
    problem: str


class Tally:
    """Counts the rows of a split, and removes the bad ones.

    Attributes:
      rows: the number of rows so far.
      bad: the number of bad rows among them.

    Args:
      split: the name of the split, for error messages.
      skip: the setting that skips bad rows, for error messages: "Data.errors = 'skip'".
      progress: called for each row.
    """

    def __init__(self, split: str, skip: str, progress: Callable[[], Any] = lambda: None):
        self.rows = self.bad = 0
        self._split, self._skip, self._progress = split, skip, progress
        self._bad: list[str] = []  # Descriptions of the first bad rows.

    def usable(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items that are not BadRows, and counts all items."""
        for item in items:
            self.rows += 1
            self._progress()
            if not isinstance(item, BadRow):
                yield item
                continue
            self.bad += 1
            if len(self._bad) < KEPT:
                self._bad.append(f"{item.name} {item.problem}")

    def settled(self, items: Iterable[Any], errors: str) -> Iterator[Any]:
        """Yields the items that are not BadRows, and raises DataError at the end if necessary.

        The error is raised if all rows were bad, or if any was and `errors` is "refuse".
        """
        yield from self.usable(items)
        if self.bad == self.rows:
            raise DataError(f"{self.described()}; repair them, or name other files or columns")
        if self.bad and errors == "refuse":
            raise DataError(
                f"{self.described()}; repair them, or continue without them with {self._skip}"
            )

    def described(self) -> str:
        """Returns a sentence with the number of bad rows and the first of them."""
        more = f" and {self.bad - SHOWN:,} more" if self.bad > SHOWN else ""
        return (
            f"{self.bad:,} of {self.rows:,} rows of {self._split} cannot be used: "
            f"{', '.join(self._bad[:SHOWN])}{more}"
        )

    def report(self) -> dict[str, Any]:
        """Returns JSON for a manifest: the numbers of rows and bad rows, and descriptions of the
        first bad rows.
        """
        return {"rows": self.rows, "bad": self.bad, "first": self._bad}
