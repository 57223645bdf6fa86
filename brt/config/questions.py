"""Questions about texts that hold their answers, for an encoder that learns where these are."""

import dataclasses
from typing import Literal

from brt.config.checks import (
    check,
    check_buckets,
    check_finite,
    check_not_negative,
    check_positive,
    settle_rows,
)
from brt.config.fields import fixed, free, held_out, sources

SPECIAL = 4  # ids at most that stand around a question and its text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """Where questions come from, and how they become windows of tokens.

    A source is one of

        PATH                  .json in SQuAD's form; a directory or a glob of such files
        generated:NAME/COUNT  made up, as brt/tasks/extractive_qa/data/generated.py says

    A window is the question and a part of its text; a long text has several, which overlap.
    """

    train: tuple[str, ...] = sources(("generated:train/2000",))
    # part:SHARE: of train's rows; auto: the default's where train is, else part:0.05; (): none
    validation: tuple[str, ...] = held_out(("generated:validation/200",))
    test: tuple[str, ...] = held_out(("generated:test/200",))  # the same
    # bytes, a .model or tokenizer.json file, or train:VOCAB_SIZE
    tokenizer: str = free("bytes", cached=True, path="read")
    max_length: int = fixed(384, cached=True)  # tokens of a window
    # tokens of a text that a window shares with the one before
    stride: int = fixed(128, cached=True)
    max_question_length: int = fixed(64, cached=True)  # tokens; a longer question is cut behind
    max_answer_length: int = free(30)  # tokens of an answer that the model gives
    no_answer: bool = fixed(False, cached=True)  # questions may have none, as in SQuAD 2.0
    no_answer_margin: float = free(0.0)  # none is given where its logit is above a span's by more
    buckets: tuple[int, ...] = fixed(())  # lengths that batches are padded to; (): max_length
    # answers that are not where the file says
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    cache_dir: str = free("", path="written")  # "": $XDG_CACHE_HOME/brt or ~/.cache/brt

    def __post_init__(self) -> None:
        check_finite(self)
        settle_rows(self)
        check(bool(self.train), "Questions.train names no source")
        check_positive(self, "max_length", "max_question_length", "max_answer_length")
        check_not_negative(self, "stride")
        taken = self.stride + self.max_question_length + SPECIAL
        check(
            taken < self.max_length,
            f"Questions.max_length = {self.max_length} must be above Questions.stride + "
            f"Questions.max_question_length + {SPECIAL} = {taken}, or windows would not advance",
        )
        check_buckets(self)
