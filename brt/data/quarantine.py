"""The quarantine: a list of documents that could not be read and are left out of a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """A document that is damaged or has no text; other documents can still be read."""


class Quarantine:
    """Collects bad records up to a limit. A record counts once, even if its file is read again.

    Args:
      most: Data.max_bad_records, the limit; with 0 every bad record is raised.
    """

    def __init__(self, most: int = 0):
        self.most = most
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        """Returns True if a record of the file was collected."""
        return any(entry["file"] == file for entry in self._found.values())

    def take(self, error: BadRecord, file: str, **place: int) -> None:
        """Collects a record of a file; without `place`, everything from here to the file's end.

        Args:
          error: what is wrong.
          file: the name of the file.
          place: the number of the line or record.

        Raises:
          DataError: there are more bad records than the limit.
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

    def tried(self, read: Callable[[], T], file: str, **place: int) -> T | None:
        """Returns the result of `read`, or None after collecting the BadRecord that it raised."""
        try:
            return read()
        except BadRecord as error:
            self.take(error, file, **place)
            return None

    def write(self, directory: Path) -> None:
        """Writes a line of JSON for each collected record, if there are any."""
        if self._found:
            lines = (json.dumps(entry) + "\n" for entry in self._found.values())
            (directory / NAME).write_text("".join(lines), encoding="utf-8")
