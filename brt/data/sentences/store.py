"""The sentences of a split: ids, special ones included, and labels or numbers.

They lie on disk as brt.data.texts.arrays says.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from brt.data.pairs.ragged import Ragged
from brt.data.texts import arrays
from brt.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SentenceStore:
    """Rows of ids with a label each, or a number.

    Attributes:
      tokens: int32 ids of each row.
      targets: int32 [rows], places of the labels in `labels`; or float32 [rows].
      ids: what predictions call the rows.
      labels: all of them; none of numbers.
    """

    manifest: Mapping[str, Any]
    tokens: Ragged
    targets: Int[np.ndarray, " rows"] | Float[np.ndarray, " rows"]
    ids: tuple[str, ...]
    labels: tuple[str, ...]

    @classmethod
    def open(cls, directory: Path) -> "SentenceStore":
        """Raises DataError where it is missing, unfinished or damaged."""
        found = arrays.read(directory)
        return cls(
            manifest=found.manifest, tokens=found.ragged("tokens"),
            targets=found.arrays["targets"], ids=tuple(found.texts["ids"]),
            labels=tuple(found.texts["labels"]),
        )  # fmt: skip

    def __len__(self) -> int:
        """How many rows."""
        return len(self.ids)

    @property
    def fingerprint(self) -> str:
        """sha256 of all rows and labels."""
        return self.manifest["fingerprint"]

    def ordered(self, labels: Sequence[str]) -> "SentenceStore":
        """The same with other places for the labels.

        Raises:
          ConfigError: one that the rows have is missing.
        """
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
