"""Settings of the documents of language models."""

import dataclasses
import re
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative
from brt.config.fields import MEMORY, fill_held_out, fixed, free, held_out, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Documents of a language model, and how they become tokens.

    A source is a file, a directory (its text and source code), a pattern, `corpus:NAME/SPLIT`
    (part of brt), `tfds:NAME/SPLIT` (prepared on this machine), or
    `memory:TASK/SPLIT/COUNT?SETTINGS` (generated: docs/memory.md). Files may be compressed (.gz,
    .xz, .zst). If validation and test name no sources, they are parts of train: some of its
    documents, or the ends of documents if there are fewer than three. Memory tasks generate
    further documents instead.
    """

    train: tuple[str, ...] = sources(("corpus:novels/train",))  # Sources of the training documents.
    # Sources of the validation documents. () holds out a part of train. 'auto' means the embedded
    # novels if train has its default, and () otherwise.
    validation: tuple[str, ...] = held_out(("corpus:novels/validation",))
    # Sources of the test documents, with the same rules as validation.
    test: tuple[str, ...] = held_out(("corpus:novels/test",))
    # A directory written by brt.prepare. It replaces all sources and the tokenizer.
    store: str = free("", path="read")
    # 'bytes', a sentencepiece .model file, a byte-level tokenizer.json, or 'train:VOCAB_SIZE' to
    # train a tokenizer on the training documents.
    tokenizer: str = free("bytes", cached=True, path="read")
    # Name of the field that holds the text in JSON, tables and TFDS.
    text_field: str = free("text", cached=True)
    # 'strict' treats NULs and bytes that are not UTF-8 as errors; 'replace' reads them as U+FFFD.
    errors: Literal["strict", "replace"] = free("strict", cached=True)
    # Number of unreadable documents that may be left out; quarantine.jsonl lists them.
    max_bad_records: int = free(0, cached=True)
    # Largest size in bytes of a record, and of the content of a compressed file.
    max_document_bytes: int = free(1 << 30)
    # Share of the documents of train that is held out if validation names no source.
    validation_fraction: float = free(0.05, cached=True)
    # Share of the documents of train that is held out if test names no source.
    test_fraction: float = free(0.05, cached=True)
    # Directory for prepared data; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")
    # Steps after which the second and each further source of train is added; for memory tasks only.
    # () reads all sources from the start.
    curriculum: tuple[int, ...] = fixed(())

    def __post_init__(self) -> None:
        check_finite(self)
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
        """Returns train's memory tasks for another split, with the share of documents it has."""
        share = getattr(self, f"{split}_fraction")
        tasks = [re.fullmatch(rf"({MEMORY}\w+)/train/(\d+)(.*)", name) for name in self.train]
        return tuple(
            f"{task[1]}/{split}/{max(round(share * int(task[2])), 1)}{task[3]}"
            for task in tasks
            if task and share
        )
