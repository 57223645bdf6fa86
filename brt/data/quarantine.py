"""The quarantine: a list of documents that could not be read and are left out of a store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """An error which says that a document is damaged or has no text.

    Reading may continue with the other documents.
    """


class Quarantine:
    """Collects the errors of bad records, which are documents that cannot be read, up to a limit.

    A record counts once, even if its file is read again.

    Args:
      most: the largest number of bad records, Data.max_bad_records. With 0, the error of the first
        bad record is raised.
    """

    def __init__(self, most: int = 0):
        self.most = most
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        """Returns True if an error of this file was collected before."""
        return any(entry["file"] == file for entry in self._found.values())

    def collect(self, error: BadRecord, file: str, **place: int) -> None:
        """Collects the error of a bad record, or raises an error if the limit is exceeded.

        Args:
          error: the error of the record.
          file: the name of the file.
          place: the number of the bad line or record, as `line=` or `record=`; nothing if the error
            concerns the whole rest of the file.

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

    def call_and_collect(self, read: Callable[[], T], file: str, **place: int) -> T | None:
        """Calls a function, and collects its error if it raises BadRecord.

        Args:
          read: function that reads a record.
          file: the name of the file.
          place: the number of the line or record; see `collect`.

        Returns:
          The result of `read`; None if an error was collected.

        Raises:
          DataError: there are more bad records than the limit.
        """
        try:
            return read()
        except BadRecord as error:
            self.collect(error, file, **place)
            return None

    def write(self, directory: Path) -> None:
        """Writes quarantine.jsonl, which has a line of JSON for each collected error.

        If no error was collected, no file is written.

        Args:
          directory: the directory that receives the file.
        """
        if self._found:
            lines = (json.dumps(entry) + "\n" for entry in self._found.values())
            (directory / NAME).write_text("".join(lines), encoding="utf-8")
