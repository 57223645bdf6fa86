"""Where a language model's documents come from."""

import dataclasses
from typing import Literal

from brt.config.checks import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where documents come from and how they become tokens.

    A source is a file, a directory (its *.txt files), a glob, `corpus:NAME/SPLIT` (embedded),
    or `tfds:NAME/SPLIT` (prepared on this machine). Files may be compressed (.gz, .xz, .zst).
    """

    train: tuple[str, ...] = ("corpus:novels/train",)
    validation: tuple[str, ...] = ("corpus:novels/validation",)
    test: tuple[str, ...] = ("corpus:novels/test",)
    store: str = ""  # a directory written by brt.prepare; replaces everything below and above
    tokenizer: str = "bytes"  # bytes | path/to/a .model or byte-level .json | train:VOCAB_SIZE
    text_field: str = "text"  # the field of a JSONL line or of a TFDS example
    errors: Literal["strict", "replace"] = "strict"  # bytes that are not UTF-8
    validation_fraction: float = 0.05  # of the documents, where validation names no source
    test_fraction: float = 0.05  # the same for test
    cache_dir: str = ""  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt
    shuffle: bool = True  # documents in a new order every epoch

    def __post_init__(self) -> None:
        check(bool(self.train or self.store), "Data.train names no source and Data.store is empty")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            check(0 <= value < 1, f"Data.{name} = {value} must be in [0, 1)")
