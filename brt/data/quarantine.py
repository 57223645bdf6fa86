"""Documents that cannot be read, left out one by one, named and counted: quarantine.jsonl."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from brt.errors import DataError

NAME = "quarantine.jsonl"
T = TypeVar("T")


class BadRecord(DataError):
    """A document that is damaged or holds no text; what else there is can be read."""


class Quarantine:
    """Takes bad records out, up to a number of them.

    Each counts once, however often its file is read.

    Args:
      most: Data.max_bad_records; with 0 the first one is raised as it is.
    """

    def __init__(self, most: int = 0):
        self.most = most
        self._found: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def knows(self, file: str) -> bool:
        """Whether something of a file was taken."""
        return any(said["file"] == file for said in self._found.values())

    def take(self, error: BadRecord, file: str, **place: int) -> None:
        """Takes a record of a file, or with no `place` all that is left of it.

        Raises:
          DataError: it is one too many.
        """
        if not self.most:
            raise error
        said = {"file": file, **place, "reason": str(error)}
        self._found.setdefault(json.dumps([file, place]), said)
        if len(self) > self.most:
            raise DataError(
                f"{len(self)} documents cannot be read, more than Data.max_bad_records = "
                f"{self.most}; the last is this: {error}"
            )

    def tried(self, read: Callable[[], T], file: str, **place: int) -> T | None:
        """What `read` gives; None where it is bad, which is taken."""
        try:
            return read()
        except BadRecord as error:
            self.take(error, file, **place)
            return None

    def write(self, directory: Path) -> None:
        """Says what was taken, a line each, if anything was."""
        if self._found:
            lines = (json.dumps(said) + "\n" for said in self._found.values())
            (directory / NAME).write_text("".join(lines), encoding="utf-8")
