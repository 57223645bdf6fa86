"""Counts rows that cannot be used, and either raises an error about them or skips them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from brt.errors import DataError

SHOWN = 3  # An error message lists at most this number of bad rows.
KEPT = 20  # A manifest lists at most this number of bad rows.


class BadRow(NamedTuple):
    """The name of a row that cannot be used, and the problem, such as "has an empty summary"."""

    name: str
    problem: str


class Tally:
    """Counts the rows of a split (`rows`), and separates those that cannot be used (`bad`).

    `skip` is the text "Data.errors = 'skip'", which error messages recommend to a user who wants to
    train without the bad rows. `progress` is called for each row.
    """

    def __init__(self, split: str, skip: str, progress: Callable[[], Any] = lambda: None):
        self.rows = self.bad = 0
        self._split, self._skip, self._progress = split, skip, progress
        self._bad: list[str] = []  # The list has descriptions of the first bad rows.

    def usable(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yields the items that are not of the class BadRow, and counts all items."""
        for item in items:
            self.rows += 1
            self._progress()
            if not isinstance(item, BadRow):
                yield item
                continue
            self.bad += 1
            if len(self._bad) < KEPT:
                self._bad.append(f"{item.name} {item.problem}")

    def refuse_or_skip(self, items: Iterable[Any], errors: str) -> Iterator[Any]:
        """Yields the items that are not of the class BadRow, and may raise DataError at the end.

        It does if all rows are bad, or if a row is bad and `errors` (Data.errors) is "refuse", not
        "skip".
        """
        yield from self.usable(items)
        if self.bad == self.rows:
            raise DataError(f"{self.described()}; repair them, or name other files or columns")
        if self.bad and errors == "refuse":
            raise DataError(
                f"{self.described()}; repair them, or continue without them with {self._skip}"
            )

    def described(self) -> str:
        more = f" and {self.bad - SHOWN:,} more" if self.bad > SHOWN else ""
        return (
            f"{self.bad:,} of {self.rows:,} rows of {self._split} cannot be used: "
            f"{', '.join(self._bad[:SHOWN])}{more}"
        )

    def report(self) -> dict[str, Any]:
        """Returns counts and descriptions of the first bad rows, as JSON for a manifest."""
        return {"rows": self.rows, "bad": self.bad, "first": self._bad}
