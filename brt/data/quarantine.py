"""The quarantine: a list of documents that could not be read and are left out of a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """An error about a document that is damaged or has no text; the other documents can be read."""


class Quarantine:
    """Collects the errors of bad records, which are documents that cannot be read, up to a limit.

    A record counts once, even if its file is read again. With the limit `most` = 0, no error is
    collected: the first is raised.
    """

    def __init__(self, most: int = 0):
        self.most = most
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        return any(entry["file"] == file for entry in self._found.values())

    def collect(self, error: BadRecord, file: str, **place: int) -> None:
        """Collects the error of a bad record; raises DataError if the limit is exceeded.

        `place` is the number of the bad line or record, as `line=` or `record=`; without it, the
        error concerns the whole rest of the file.
        """
        if not self.most:
            raise error
        entry = {"file": file, **place, "reason": str(error)}
        self._found.setdefault(json.dumps([file, place]), entry)
        if len(self) > self.most:
            raise DataError(
                f"{len(self)} documents cannot be read, more than Data.max_bad_records = "
                f"{self.most}; the last is this: {error}"
            )

    def call_and_collect(self, read: Callable[[], T], file: str, **place: int) -> T | None:
        """Returns the result of `read`, which reads a record; None if it has raised BadRecord."""
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
