"""From the names of sources to pairs, and what becomes of rows that hold none."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from brt.data.pairs import columns, rows
from brt.data.pairs.columns import BadRow, Columns, Pair
from brt.errors import DataError

SHOWN = 3  # bad rows that a sentence names
KEPT = 20  # bad rows that a manifest names


def read(names: Sequence[str], asked: Columns = columns.ANY) -> Iterator[Pair | BadRow]:
    """The rows of the sources (see `brt.data.pairs.rows`) in order.

    Rows are numbered through all sources, so that ids differ.

    Raises:
      DataError: a source cannot be read, has no row, or not the columns.
    """
    number = 0
    for table in (table for name in names for table in rows.tables(name)):
        chosen = None
        row = None
        for row in table.rows:
            if chosen is None and not row.problem:
                chosen = columns.choose(table.name, row.values, asked)
            yield columns.pair(row, chosen or asked, number)
            number += 1
        if row is None:
            raise DataError(f"{table.name} has no row")


class Tally:
    """Counts rows as they pass, and takes the bad ones out.

    Attributes:
      rows: that passed.
      bad: those of them that were taken out.

    Args:
      skip: what the user sets to go on without bad rows, as "Pairs.errors = 'skip'".
    """

    def __init__(self, split: str, skip: str):
        self.rows = self.bad = 0
        self._split, self._skip = split, skip
        self._bad: list[str] = []  # the first ones

    def usable(self, found: Iterable[Any]) -> Iterator[Any]:
        """What is no BadRow."""
        for item in found:
            self.rows += 1
            if not isinstance(item, BadRow):
                yield item
                continue
            self.bad += 1
            if len(self._bad) < KEPT:
                self._bad.append(f"{item.name} {item.problem}")

    def refuse(self) -> None:
        """Raises DataError if a row was bad."""
        if self.bad:
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
