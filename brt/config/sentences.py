"""Sentences with a label each, for an encoder that learns to tell the labels."""

import dataclasses
from typing import Literal

from brt.config.checks import check, check_buckets, check_finite, check_positive, settle_rows
from brt.config.fields import fixed, free, held_out, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentences:
    """Where sentences, or pairs of them, come from, and how they become tokens.

    A source is one of

        PATH                  JSON lines, CSV, Parquet, or tab-separated values as GLUE has them
                              (.jsonl .json .csv .parquet .tsv); a directory or a glob of such files
        tfds:NAME/SPLIT       prepared on this machine
        generated:NAME/COUNT  made up, as brt/tasks/text_classification/data/generated.py says
    """

    train: tuple[str, ...] = sources(("generated:train/2000",))
    # part:SHARE: of train's rows; auto: the default's where train is, else part:0.05; (): none
    validation: tuple[str, ...] = held_out(("generated:validation/200",))
    test: tuple[str, ...] = held_out(("generated:test/200",))  # the same
    # column of the sentence; "": a usual name, of a pair where there is one
    first_field: str = free("", cached=True)
    # column of what it is paired with; "" beside first_field: nothing
    second_field: str = free("", cached=True)
    label_field: str = free("", cached=True)  # column of the label; "": a usual name
    id_field: str = free("", cached=True)  # column that names a row in predictions; "": counted
    # columns of .tsv files, where these begin without their names
    header: tuple[str, ...] = free((), cached=True)
    labels: tuple[str, ...] = fixed(())  # all, in the classifier's order; (): train's, sorted
    # bytes, a .model or tokenizer.json file, or train:VOCAB_SIZE
    tokenizer: str = free("bytes", cached=True, path="read")
    # tokens of a row; of a pair the longer sentence is cut first
    max_length: int = fixed(128, cached=True)
    buckets: tuple[int, ...] = fixed(())  # lengths that batches are padded to; (): max_length
    # rows that hold no sentence or no known label
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    cache_dir: str = free("", path="written")  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt

    def __post_init__(self) -> None:
        check_finite(self)
        settle_rows(self)
        check(bool(self.train), "Sentences.train names no source")
        check(
            self.max_length >= 8,
            f"Sentences.max_length = {self.max_length} must be at least 8: some ids are special",
        )
        check_positive(self, "max_length")
        check(
            bool(self.first_field) or not self.second_field,
            f"Sentences.second_field = {self.second_field!r} needs Sentences.first_field",
        )
        check(
            len(set(self.labels)) == len(self.labels),
            f"Sentences.labels = {self.labels} has one of them twice",
        )
        check_buckets(self)
