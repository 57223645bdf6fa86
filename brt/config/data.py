"""Settings of the documents of language models."""

import dataclasses
import re
from typing import Literal

from brt.config.checks import (
    check,
    check_columns,
    check_finite,
    check_not_negative,
    column,
    settle_paths,
)
from brt.config.fields import MEMORY, fill_held_out, fixed, free, held_out, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Settings that name the documents of a language model and make tokens of them.

    A source is a file, a directory (its texts and source code), a glob pattern, `corpus:NAME/SPLIT`
    (part of brt), `tfds:NAME/SPLIT` (prepared on this machine), or
    `memory:TASK/SPLIT/COUNT?SETTINGS` (documents that brt generates to test a model's memory, as
    docs/memory.md describes). Files may be compressed (.gz, .xz, .zst). If validation and test name
    no sources, a part of the training documents is held out: whole documents, or the ends of
    documents if there are fewer than three. If the training documents are memory tasks, further
    documents are generated instead.
    """

    # The training documents are read from these sources.
    train: tuple[str, ...] = sources(("corpus:novels/train",))
    # The validation documents are read from these sources. () holds out a part of the training
    # documents. The default is 'auto', which stands for 'corpus:novels/validation' if `train` has
    # its default, and otherwise for ().
    validation: tuple[str, ...] = held_out(("corpus:novels/validation",))
    # The test documents are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("corpus:novels/test",))
    # This directory, which brt.prepare wrote, replaces all sources and the tokenizer.
    store: str = free("", path="read")
    # The tokenizer is 'bytes', a sentencepiece .model file or a byte-level tokenizer.json.
    # 'train:VOCAB_SIZE' trains a tokenizer on the training documents.
    tokenizer: str = free("bytes", cached=True, path="read")
    # 'text=FIELD' names the field (JSON), column (tables) or feature (TFDS) that contains the text;
    # () takes the name 'text'.
    columns: tuple[str, ...] = free((), cached=("text_field",))
    # 'strict' treats NULs and bytes that are not UTF-8 as errors; 'replace' reads them as U+FFFD.
    errors: Literal["strict", "replace"] = free("strict", cached=True)
    # This number of unreadable documents may be left out. They are listed in quarantine.jsonl. More
    # unreadable documents are an error.
    max_bad_records: int = free(0, cached=True)
    # A record, and the content of a compressed file, has at most this number of bytes.
    max_document_bytes: int = free(1 << 30)
    # This share of the training documents is held out if validation names no source.
    validation_fraction: float = free(0.05, cached=True)
    # This share of the training documents is held out if test names no source.
    test_fraction: float = free(0.05, cached=True)
    # 'yes' also predicts an end token, the first of Model.end_ids, after the last token of each
    # document of a language model. 'auto' is 'yes' for models with such ids, which are pretrained
    # decoders. Evaluation may change the setting; training that resumes reads as before.
    score_ends: Literal["auto", "yes", "no"] = free("auto")
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")
    # Training begins with the first source of `train` only, and adds one more source at each of
    # these ascending steps. This is possible for memory tasks only. () reads all sources from the
    # start.
    curriculum: tuple[int, ...] = fixed(())

    def __post_init__(self) -> None:
        check_finite(self)
        settle_paths(self)
        check_columns(self, "text")
        fill_held_out(self, ())
        for split in ("validation", "test"):
            if not getattr(self, split):
                object.__setattr__(self, split, self._memory_tasks(split))
        check(bool(self.train or self.store), "Data.train names no source and Data.store is empty")
        self._check_curriculum()
        check(
            self.max_document_bytes > 0,
            f"Data.max_document_bytes = {self.max_document_bytes} must be above 0",
        )
        check_not_negative(self, "max_bad_records")
        for name in ("validation_fraction", "test_fraction"):
            value = getattr(self, name)
            check(0 <= value < 1, f"Data.{name} = {value} must be in [0, 1)")

    @property
    def text_field(self) -> str:
        """Name of the JSON field, the column or the TFDS feature that contains the text."""
        return column(self, "text", "text")

    def _check_curriculum(self) -> None:
        steps, memory_only = self.curriculum, all(name.startswith(MEMORY) for name in self.train)
        check(
            not steps or (memory_only and not self.store),
            f"Data.curriculum = {steps} is for memory tasks, and Data.train = {self.train} or "
            f"Data.store = {self.store!r} is not one",
        )
        check(
            not steps or len(steps) == len(self.train) - 1,
            f"Data.curriculum = {steps} must have a step for every source of Data.train but the "
            f"first; these are {len(self.train) - 1}",
        )
        check(
            all(a < b for a, b in zip((0, *steps), steps, strict=False)),
            f"Data.curriculum = {steps} must be ascending steps above 0",
        )

    def _memory_tasks(self, split: str) -> tuple[str, ...]:
        """Returns the sources of the training memory tasks for another split.

        The number of documents is the share of the split (`validation_fraction`, `test_fraction`).
        """
        share = getattr(self, f"{split}_fraction")
        tasks = [re.fullmatch(rf"({MEMORY}\w+)/train/(\d+)(.*)", name) for name in self.train]
        return tuple(
            f"{task[1]}/{split}/{max(round(share * int(task[2])), 1)}{task[3]}"
            for task in tasks
            if task and share
        )
