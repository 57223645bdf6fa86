"""The sentences of a split: ids, special ones included, and labels or numbers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from brt.data.rows import store
from brt.data.rows.ragged import Ragged
from brt.data.rows.store import RowStore
from brt.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SentenceStore(RowStore):
    """Rows of ids with a label each, or a number.

    Attributes:
      tokens: int32 ids of each row.
      targets: int32 [rows], places of the labels in `labels`; or float32 [rows].
      labels: all of them; none of numbers.
    """

    tokens: Ragged
    targets: Int[np.ndarray, " rows"] | Float[np.ndarray, " rows"]
    labels: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path) -> "SentenceStore":
        """Raises DataError where it is missing, unfinished or damaged."""
        with store.opened(directory, facts={"rows": {"bad": int}}) as found:
            columns = {name: found.columns[name] for name in ("targets", "ids", "labels")}
            tokens = found.ragged("tokens")
            if columns["labels"]:
                store.within("targets", columns["targets"], len(columns["labels"]))
            if {*map(len, (columns["targets"], columns["ids"]))} != {len(tokens)}:
                raise ValueError("its columns have other lengths")
        return cls(directory=directory, manifest=found.manifest, tokens=tokens, **columns)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        """Tokens of each row."""
        return self.tokens.lengths

    def read(self, row: int | np.integer) -> Int[np.ndarray, " T"]:
        """The ids of a row."""
        return self.tokens[row]

    @property
    def row_targets(self) -> Int[np.ndarray, "rows 1"] | Float[np.ndarray, "rows 1"]:
        """What a model says of each row."""
        return self.targets[:, None]

    def ordered(self, labels: Sequence[str]) -> "SentenceStore":
        """The same with other places for the labels.

        Raises:
          ConfigError: one that the rows have is missing.
        """
        if tuple(labels) == self.labels:
            return self
        if missing := [label for label in self.labels if label not in labels]:
            raise ConfigError(
                f"Sentences.labels = {tuple(labels)} lacks {missing[0]!r}, which Sentences.train "
                f"has; set it to {self.labels} in the order you want, or leave it out"
            )
        places = np.array([labels.index(label) for label in self.labels], np.int32)
        manifest = {**self.manifest, "fingerprint": f"{self.fingerprint} {'|'.join(labels)}"}
        return dataclasses.replace(
            self, targets=places[self.targets], labels=tuple(labels), manifest=manifest
        )
