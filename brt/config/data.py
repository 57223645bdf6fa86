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

    train: tuple[str, ...] = sources(("corpus:novels/train",))
    # (): a part of train; auto: the novels' if train has its default, otherwise ()
    validation: tuple[str, ...] = held_out(("corpus:novels/validation",))
    test: tuple[str, ...] = held_out(("corpus:novels/test",))  # like validation
    # a directory written by brt.prepare, which replaces all sources and the tokenizer
    store: str = free("", path="read")
    # bytes, a sentencepiece .model, a byte-level tokenizer.json, or train:VOCAB_SIZE
    tokenizer: str = free("bytes", cached=True, path="read")
    text_field: str = free("text", cached=True)  # field of JSON, tables and TFDS with the text
    # replace: NULs and bytes that are not UTF-8 become U+FFFD; strict: they are errors
    errors: Literal["strict", "replace"] = free("strict", cached=True)
    # number of unreadable documents to leave out, which quarantine.jsonl lists
    max_bad_records: int = free(0, cached=True)
    # largest size of a record, and of the content of a compressed file
    max_document_bytes: int = free(1 << 30)
    # share of train's documents, if validation names no source
    validation_fraction: float = free(0.05, cached=True)
    test_fraction: float = free(0.05, cached=True)  # share of train's documents for test
    # where prepared data are stored; "": $XDG_CACHE_HOME/brt or ~/.cache/brt
    cache_dir: str = free("", path="written")
    # steps from which the second and further sources of train are read, too; for memory tasks
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
