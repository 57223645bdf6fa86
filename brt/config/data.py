"""Where a language model's documents come from."""

import dataclasses
import re
from typing import Literal

from brt.config.checks import check, check_finite, check_not_negative
from brt.config.fields import MEMORY, fixed, free, held_out, settle, sources


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Where documents come from and how they become tokens.

    A source is a file, a directory (its text and source code), a glob, `dataset:NAME/SPLIT`
    (embedded), `tfds:NAME/SPLIT` (prepared on this machine), or `memory:TASK/SPLIT/COUNT?SETTINGS`
    (made up: docs/memory.md). Files may be compressed (.gz, .xz, .zst). Where validation and test
    name none, they are a part of train: of its documents, or of fewer than three documents the
    ends; of memory tasks documents of their own.
    """

    train: tuple[str, ...] = sources(("corpus:novels/train",))
    # (): a part of train; auto: the novels' where train is theirs, else ()
    validation: tuple[str, ...] = held_out(("corpus:novels/validation",))
    test: tuple[str, ...] = held_out(("corpus:novels/test",))  # the same
    store: str = free(
        "", path="read"
    )  # a directory written by brt.prepare; replaces everything below and above
    # bytes | path/to/a .model or byte-level .json | train:VOCAB_SIZE
    tokenizer: str = free("bytes", cached=True, path="read")
    text_field: str = free("text", cached=True)  # of JSON, tables and TFDS examples
    errors: Literal["strict", "replace"] = free("strict", cached=True)  # NULs, what is not UTF-8
    # so many documents that cannot be read are left out, and named in quarantine.jsonl; 0: none is
    max_bad_records: int = free(0, cached=True)
    # of a record, and of what a compressed file becomes: more is refused
    max_document_bytes: int = free(1 << 30)
    # of the documents, where validation names no source
    validation_fraction: float = free(0.05, cached=True)
    test_fraction: float = free(0.05, cached=True)  # the same for test
    cache_dir: str = free("", path="written")  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt
    # of memory tasks: steps after which the second and further sources of train are read, too
    curriculum: tuple[int, ...] = fixed(())

    def __post_init__(self) -> None:
        check_finite(self)
        settle(self, ())
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
        steps, own = self.curriculum, all(name.startswith(MEMORY) for name in self.train)
        check(
            not steps or (own and not self.store),
            f"Data.curriculum = {steps} is for memory tasks, and not for what Data.train = "
            f"{self.train} or Data.store = {self.store!r} name",
        )
        check(
            not steps or len(steps) == len(self.train) - 1,
            f"Data.curriculum = {steps} must have a step for every source of Data.train but the "
            f"first, which are {len(self.train) - 1}",
        )
        check(
            all(a < b for a, b in zip((0, *steps), steps, strict=False)),
            f"Data.curriculum = {steps} must be steps above 0, each after the one before",
        )

    def _memory_tasks(self, split: str) -> tuple[str, ...]:
        """Those of train with documents of another split, as many as its fraction says."""
        share = getattr(self, f"{split}_fraction")
        tasks = [re.fullmatch(rf"({MEMORY}\w+)/train/(\d+)(.*)", name) for name in self.train]
        return tuple(
            f"{task[1]}/{split}/{max(round(share * int(task[2])), 1)}{task[3]}"
            for task in tasks
            if task and share
        )
