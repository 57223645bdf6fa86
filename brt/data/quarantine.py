"""The quarantine: a list of documents that could not be read and are left out of a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """The error that a document is damaged or has no text, while other documents can still
    be read.
    """


class Quarantine:
    """Collects bad records up to a limit. A record counts once, even if its file is read again.

    Args:
      most: the largest number of bad records, Data.max_bad_records; with 0 the first one is raised.
    """

    def __init__(self, most: int = 0):
        self.most = most
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        """Returns True if a bad record of the file was collected before."""
        return any(entry["file"] == file for entry in self._found.values())

    def take(self, error: BadRecord, file: str, **place: int) -> None:
        """Collects a bad record of a file. Without `place`, the rest of the file cannot be read.

        Args:
          error: what is wrong.
          file: the name of the file.
          place: the number of the line or record, as `line=` or `record=`.

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
        """Returns the result of `read`, or collects the BadRecord that it raises and returns None.

        Args:
          read: function that reads a record.
          file: the name of the file.
          place: see `take`.
        """
        try:
            return read()
        except BadRecord as error:
            self.take(error, file, **place)
            return None

    def write(self, directory: Path) -> None:
        """Writes quarantine.jsonl with a line of JSON for each collected record; no file if there
        are none.
        """
        if self._found:
            lines = (json.dumps(entry) + "\n" for entry in self._found.values())
            (directory / NAME).write_text("".join(lines), encoding="utf-8")
