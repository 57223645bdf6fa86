"""Documents and rows that cannot be used: they raise an error, or are counted and left out.

The quarantine is a list of the documents that are left out of a store.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """An error about a document that is damaged or has no text; the other documents can be read."""


class Quarantine:
    """Collects the errors of up to `limit` bad records, which are documents that cannot be read.

    A record counts once, even if its file is read again. With `limit` = 0, no error is collected,
    and the first error is raised.
    """

    def __init__(self, limit: int = 0):
        self.limit = limit
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        return any(entry["file"] == file for entry in self._found.values())

    def collect(self, error: BadRecord, file: str, **place: int) -> None:
        """Collects the error of a bad record; raises DataError if the limit is exceeded.

        `place` is the number of the bad line or record, given as `line=` or `record=`. An error
        without a place concerns the whole rest of the file.
        """
        if not self.limit:
            raise error
        entry = {"file": file, **place, "reason": str(error)}
        self._found.setdefault(json.dumps([file, place]), entry)
        if len(self) > self.limit:
            raise DataError(
                f"{len(self)} documents cannot be read, more than Data.max_bad_records = "
                f"{self.limit}; the last is this: {error}"
            )

    def call_and_collect(self, read: Callable[[], T], file: str, **place: int) -> T | None:
        """Returns what `read` returns, or None if `read` raises BadRecord, which is collected."""
        try:
            return read()
        except BadRecord as error:
            self.collect(error, file, **place)
            return None

    def write(self, directory: Path) -> None:
        """Writes quarantine.jsonl, a line of JSON for each collected error, if there are any."""
        if self._found:
            lines = (json.dumps(entry) + "\n" for entry in self._found.values())
            (directory / NAME).write_text("".join(lines), encoding="utf-8")


SHOWN = 3  # An error message lists at most this number of bad rows.
KEPT = 20  # A manifest lists at most this number of bad rows.


class BadRow(NamedTuple):
    """The name of a row that cannot be used, and the problem, such as "has an empty summary"."""

    name: str
    problem: str


class Tally:
    """Counts the rows of a split (`rows`), and the rows that cannot be used (`bad`).

    `skip` is the setting that error messages recommend to a user who wants to train without the bad
    rows. `progress` is called for each row.
    """

    def __init__(
        self,
        split: str,
        skip: str = "Data.errors = 'skip'",
        progress: Callable[[], Any] = lambda: None,
    ):
        self.rows = self.bad = 0
        self._split, self._skip, self._progress = split, skip, progress
        self._bad: list[str] = []  # descriptions of the first bad rows

    def refuse_or_skip(self, items: Iterable[Any], errors: str) -> Iterator[Any]:
        """Counts all items, and yields those that are not of the class BadRow.

        DataError is raised at the end if all rows are bad. If `errors` (the setting Data.errors) is
        "refuse", it is also raised if only some rows are bad.
        """
        for item in items:
            self.rows += 1
            self._progress()
            if not isinstance(item, BadRow):
                yield item
                continue
            self.bad += 1
            if len(self._bad) < KEPT:
                self._bad.append(f"{item.name} {item.problem}")
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
