"""Stores of sentences on disk: token ids, including special ids, with labels or numbers.

The files of a store are described in `brt.data.rows.store`.
"""

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
    """Sentences (or pairs of sentences) of a split as token ids, each with a label or a number."""

    tokens: Ragged  # token ids of each row, int32 [T]
    # int32 indices into `labels`, or float32 numbers
    targets: Int[np.ndarray, " rows"] | Float[np.ndarray, " rows"]
    labels: tuple[str, ...]  # names of all labels; empty for numbers

    @classmethod
    def open(cls, directory: Path) -> "SentenceStore":
        with store.opened(directory, facts={"rows": {"bad": int}}) as opened:
            columns = {name: opened.columns[name] for name in ("targets", "ids", "labels")}
            tokens = opened.ragged("tokens")
            if columns["labels"]:
                store.check_indices("targets", columns["targets"], len(columns["labels"]))
            if {*map(len, (columns["targets"], columns["ids"]))} != {len(tokens)}:
                raise ValueError("its columns have different lengths")
        return cls(directory=directory, manifest=opened.manifest, tokens=tokens, **columns)

    @property
    def lengths(self) -> Int[np.ndarray, " rows"]:
        return self.tokens.lengths

    def read(self, row: int | np.integer) -> Int[np.ndarray, " T"]:
        return self.tokens[row]

    @property
    def row_targets(self) -> Int[np.ndarray, "rows 1"] | Float[np.ndarray, "rows 1"]:
        """Target that the model has to predict for each row: the index of a label, or a number."""
        return self.targets[:, None]

    def with_labels(self, labels: Sequence[str]) -> "SentenceStore":
        """Returns the store with the labels in another order, and possibly with additional labels.

        The targets of the result are indices into `labels`. When a model is evaluated, the order of
        `labels` must be the order of the model's outputs. Raises ConfigError if `labels` lacks one.
        """
        if tuple(labels) == self.labels:
            return self
        if missing := [label for label in self.labels if label not in labels]:
            raise ConfigError(
                f"Sentences.labels = {tuple(labels)} lacks {missing[0]!r}, which Data.train "
                f"has; set it to {self.labels} in the order you want, or remove it"
            )
        indices = np.array([labels.index(label) for label in self.labels], np.int32)
        manifest = {**self.manifest, "fingerprint": f"{self.fingerprint} {'|'.join(labels)}"}
        return dataclasses.replace(
            self, targets=indices[self.targets], labels=tuple(labels), manifest=manifest
        )
