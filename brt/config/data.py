"""Settings of the data of all tasks."""

import dataclasses
import re
from typing import Literal

from brt.config.checks import check, check_columns, check_rows, check_section, column
from brt.config.fields import MEMORY, derived, fill_held_out, fixed, free, held_out, sources

SPECIAL = 4  # A window has at most this number of special tokens, such as separators.


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
    # documents. By default, validation is 'corpus:novels/validation' if `train` has its
    # default, and otherwise ().
    validation: tuple[str, ...] = held_out(("corpus:novels/validation",))
    # The test documents are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("corpus:novels/test",))
    # This directory, which brt.prepare wrote, replaces all sources and the tokenizer.
    store: str = free("", path="read")
    # The tokenizer is 'bytes', a sentencepiece .model file or a byte-level tokenizer.json.
    # 'train:VOCAB_SIZE' trains a tokenizer on the training documents.
    tokenizer: str = free("bytes", cached=True, path="read")
    # 'text=FIELD' names the field (JSON), column (tables) or feature (TFDS) that contains the text;
    # () takes 'text'. ('prompt=FIELD', 'completion=FIELD') reads pairs instead, joined by
    # 'separator=TEXT'. 'messages=FIELD' reads conversations, which the tokenizer's chat template
    # turns into texts. Of pairs and conversations, only completions, the assistant's messages and
    # end tokens are scored.
    columns: tuple[str, ...] = free((), cached=True)
    # 'strict' treats NULs and bytes that are not UTF-8 as errors; 'replace' reads them as U+FFFD.
    errors: Literal["strict", "replace"] = free("strict", cached=True)
    # This number of unreadable documents may be left out. They are listed in quarantine.jsonl. More
    # unreadable documents are an error.
    max_bad_records: int = free(0, cached=True)
    # This share of the training documents is held out if validation names no source.
    validation_fraction: float = free(0.05, cached=True)
    # This share of the training documents is held out if test names no source.
    test_fraction: float = free(0.05, cached=True)
    # With 'yes', a language model also predicts an end token, the first of Model.end_ids, after the
    # last token of each document. 'auto' means 'yes' if the model has such ids, as pretrained
    # decoders do. Evaluation may change the setting, but a run that resumes must not change it.
    score_ends: Literal["auto", "yes", "no"] = free("auto")
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")
    # Training begins with the first source of `train` only, and adds one more source at each of
    # these ascending steps. This is possible for memory tasks only. () reads all sources from the
    # start.
    curriculum: tuple[int, ...] = fixed(())

    def __post_init__(self) -> None:
        shares = "validation_fraction", "test_fraction"
        check_section(self, shares=shares)
        pair = "prompt", "completion", "separator"
        check_columns(self, "text", *pair, "messages")
        roles = tuple(item.partition("=")[0] for item in self.columns)
        check(
            roles in ((), ("text",), pair[:2], pair, ("messages",)),
            f"Data.columns = {self.columns} must name a text, or a prompt and a completion, and "
            "perhaps a separator, or messages",
        )
        fill_held_out(self, ())
        for split in ("validation", "test"):
            if not getattr(self, split):
                object.__setattr__(self, split, self._memory_tasks(split))
        check(bool(self.train or self.store), "Data.train names no source and Data.store is empty")
        self._check_curriculum()

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
        """Returns sources of the held-out `split`, one for each memory task in `train`.

        A source has as many documents as the task has in `train`, multiplied by the fraction of the
        split. The result is () if the fraction is 0 or `train` has no memory tasks.
        """
        share = getattr(self, f"{split}_fraction")
        tasks = [re.fullmatch(rf"({MEMORY}\w+)/train/(\d+)(.*)", name) for name in self.train]
        return tuple(
            f"{task[1]}/{split}/{max(round(share * int(task[2])), 1)}{task[3]}"
            for task in tasks
            if task and share
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Settings that name documents with their summaries and make tokens of them.

    A source is a .jsonl, .json, .csv or .parquet file (also compressed as .gz, .xz or .zst), a
    directory or pattern of them, `corpus:NAME/SPLIT` (part of brt), or `tfds:NAME/SPLIT`
    (prepared on this machine, see `brt.prepare --pairs`).
    """

    # The training pairs are read from these sources.
    train: tuple[str, ...] = sources(("corpus:summaries/train",))
    # The validation pairs are read from these sources. 'part:SHARE' holds out this share of the
    # training rows, and () means no validation. By default, validation is
    # 'corpus:summaries/validation' if `train` has its default, and otherwise 'part:0.05'.
    validation: tuple[str, ...] = held_out(("corpus:summaries/validation",))
    # The test pairs are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("corpus:summaries/test",))
    # These are the columns of the documents, the summaries and the ids: 'source=COLUMN',
    # 'target=COLUMN', 'id=COLUMN'. If a column is not named, usual names are tried. If there are no
    # ids, the rows are numbered.
    columns: tuple[str, ...] = free((), cached=True)
    # The tokenizer is a sentencepiece .model file or a tokenizer.json file. 'train:VOCAB_SIZE'
    # trains a tokenizer on the training pairs.
    tokenizer: str = free("train:4000", cached=True, path="read")
    # This text is put before every document. T5 has "summarize: ".
    prefix: str = fixed("", cached=True)
    # A document has at most this number of tokens, including the end token; the rest is not read.
    max_source_length: int = fixed(1024, cached=True)
    # A summary has at most this number of tokens, including the end token.
    max_target_length: int = fixed(128, cached=True)
    # Batches are padded to one of these ascending source lengths in tokens; () pads all batches to
    # max_source_length.
    buckets: tuple[int, ...] = fixed(())
    # If a row is empty, damaged or not UTF-8, the file is refused or the row is skipped.
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")

    def __post_init__(self) -> None:
        check_section(self)
        check_columns(self, "source", "target", "id")
        check_rows(self, "max_source_length")
        for name in ("max_source_length", "max_target_length"):
            value = getattr(self, name)
            check(value >= 3, f"Pairs.{name} = {value} must be at least 3: begin, a token, end")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentences:
    """Settings that name labelled sentences, or pairs of sentences, and make tokens of them.

    A source is one of

        PATH                  JSON lines, CSV, Parquet, or tab-separated values
                              (.jsonl .json .csv .parquet .tsv); a directory or pattern of them
        tfds:NAME/SPLIT       prepared on this machine
        generated:NAME/COUNT  generated by brt/tasks/text_classification/preparation.py
    """

    # The training rows are read from these sources.
    train: tuple[str, ...] = sources(("generated:train/2000",))
    # The validation rows are read from these sources. 'part:SHARE' holds out this share of the
    # training rows, and () means no validation. By default, validation is
    # 'generated:validation/200' if `train` has its default or names only generated sources, and
    # otherwise 'part:0.05'.
    validation: tuple[str, ...] = held_out(("generated:validation/200",))
    # The test rows are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("generated:test/200",))
    # These are the columns of the first sentence, of the second sentence of a pair, of the label,
    # and of the id that names a row in predictions: 'first=COLUMN', 'second=COLUMN',
    # 'label=COLUMN', 'id=COLUMN'. If a column is not named, usual names are tried. If only 'first'
    # is named, a row has a single sentence.
    columns: tuple[str, ...] = free((), cached=True)
    # The columns have these names in .tsv files that have no header line.
    header: tuple[str, ...] = free((), cached=True)
    # These are all labels, in the order of the classifier's outputs; () sorts the labels of train.
    labels: tuple[str, ...] = fixed(())
    # The tokenizer is 'bytes', a sentencepiece .model file or a tokenizer.json file.
    # 'train:VOCAB_SIZE' trains a tokenizer on the training texts.
    tokenizer: str = free("bytes", cached=True, path="read")
    # A row is truncated to this number of tokens. Of a pair, the longer sentence is truncated
    # first.
    max_length: int = fixed(128, cached=True)
    # Batches are padded to one of these ascending lengths in tokens; () pads all batches to
    # max_length.
    buckets: tuple[int, ...] = fixed(())
    # If a row has no sentence or an unknown label, the file is refused ('refuse') or the row is
    # skipped ('skip').
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")

    def __post_init__(self) -> None:
        check_section(self)
        check_columns(self, "first", "second", "label", "id")
        check_rows(self, "max_length")
        check(
            self.max_length >= 8,
            f"Data.max_length = {self.max_length} must be at least 8, for the special ids",
        )
        check(
            bool(column(self, "first")) or not column(self, "second"),
            f"Data.columns = {self.columns} names a second sentence; name the first one, too: "
            "'first=COLUMN'",
        )
        check(
            len(set(self.labels)) == len(self.labels),
            f"Sentences.labels = {self.labels} contains a label twice",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """Settings that name questions about texts and divide the texts into windows of tokens.

    A source is one of

        PATH                  .json in the format of SQuAD, or a table with its columns id, context,
                              question and answers; a directory or a pattern of files
        generated:NAME/COUNT  generated by brt/tasks/extractive_qa/preparation.py

    The answer to a question is a part of the text that the question is about. A window is an input
    of the model: the question and a part of the text. The windows of a long text overlap.
    """

    # The training questions are read from these sources.
    train: tuple[str, ...] = sources(("generated:train/2000",))
    # The validation questions are read from these sources. 'part:SHARE' holds out this share of the
    # training rows, and () means no validation. By default, validation is
    # 'generated:validation/200' if `train` has its default or names only generated sources, and
    # otherwise 'part:0.05'.
    validation: tuple[str, ...] = held_out(("generated:validation/200",))
    # The test questions are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("generated:test/200",))
    # The tokenizer is 'bytes', a sentencepiece .model file or a tokenizer.json file.
    # 'train:VOCAB_SIZE' trains a tokenizer on the training texts.
    tokenizer: str = free("bytes", cached=True, path="read")
    # A window, which contains the question and a part of the text, has at most this number of
    # tokens.
    max_length: int = fixed(384, cached=True)
    # Neighbouring windows of a text share this number of tokens.
    stride: int = fixed(128, cached=True)
    # A question is truncated to this number of tokens.
    max_question_length: int = fixed(64, cached=True)
    max_answer_length: int = free(30)  # A predicted answer has at most this number of tokens.
    # True allows questions without an answer, as in SQuAD 2.0.
    no_answer: bool = fixed(False, cached=True)
    # Batches are padded to one of these ascending lengths in tokens; () pads all batches to
    # max_length.
    buckets: tuple[int, ...] = fixed(())
    # If an answer is not at the position that the file gives, the file is refused or the row is
    # skipped.
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")

    def __post_init__(self) -> None:
        lengths = "max_length", "max_question_length", "max_answer_length"
        check_section(self, positive=lengths)
        check_rows(self, "max_length")
        taken = self.stride + self.max_question_length + SPECIAL
        check(
            taken < self.max_length,
            f"Data.max_length = {self.max_length} must be above Questions.stride + "
            f"Questions.max_question_length + {SPECIAL} = {taken}, or windows would not move on",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speech:
    """Settings that name utterances with transcripts and make frames and tokens of them.

    A source is one of

        PATH.npz              arrays `features` (frames, width), `lengths`, `ids`, `transcripts`,
                              and optionally `speakers`; the utterances are concatenated
        PATH.tsv[:SPLIT]      a table of WAV files with the columns `file` and `transcript`,
                              and optionally `speaker` and `split`, which selects rows
        PATH                  a Kaldi-style directory: `text`, `wav.scp` or `feats.scp`, and
                              optionally `utt2spk`
        generated:NAME/COUNT  generated by brt/tasks/speech_recognition/sources.py
    """

    # The training utterances are read from these sources.
    train: tuple[str, ...] = sources(("generated:train/1000",))
    # The validation utterances are read from these sources. 'part:SHARE' holds out this share of
    # the training rows, and () means no validation. By default, validation is
    # 'generated:validation/100' if `train` has its default or names only generated sources, and
    # otherwise 'part:0.05'.
    validation: tuple[str, ...] = held_out(("generated:validation/100",))
    # The test utterances are read from these sources, with the same rules as for validation.
    test: tuple[str, ...] = held_out(("generated:test/100",))
    # A token is a character or a word of the transcript.
    unit: Literal["characters", "words"] = fixed("characters", cached=True)
    # This number of recordings of a speaker, in random order, is joined to one utterance.
    join: int = fixed(1, cached=True)
    # All training recordings are joined in this number of random orders, if join is above 1.
    join_orders: int = fixed(1, cached=True)
    # The WAV files of the training data have this number of samples per second; others are refused.
    sample_rate: int = derived(0, inherited=False, cached=True)
    # A frame of a WAV file has this number of mel bands as its features.
    mel_bands: int = fixed(40, cached=True)
    # Each feature is normalised to mean 0 and deviation 1 over the frames of an utterance or of a
    # speaker, or not at all.
    normalization: Literal["none", "utterance", "speaker"] = fixed("utterance", cached=True)
    # This number of consecutive normalised frames becomes one frame.
    stack: int = fixed(1, cached=True)
    # Batches are padded to one of these ascending lengths, which count the frames that remain after
    # `stack`. () pads all batches to the longest utterance.
    buckets: tuple[int, ...] = fixed((), cached="longest")
    # If utterances are too short for CTC, or too long, the file is refused or the utterances are
    # skipped.
    errors: Literal["refuse", "skip"] = free("refuse", cached=True)
    # (N, T): SpecAugment masks N intervals of time in an utterance, each of at most T frames, such
    # as (2, 40).
    time_masks: tuple[int, int] = free((0, 0))
    # (N, F): SpecAugment masks N bands of features, each of at most F features.
    feature_masks: tuple[int, int] = free((0, 0))
    # Prefix beam search has this number of beams; 1 takes the most probable token of every frame.
    beams: int = free(1)
    # Prepared data are written to this directory; '' means $XDG_CACHE_HOME/brt or ~/.cache/brt.
    cache_dir: str = free("", path="written")

    def __post_init__(self) -> None:
        check_section(self, positive=["join", "join_orders", "mel_bands", "stack", "beams"])
        check_rows(self)
        for name in ("time_masks", "feature_masks"):
            count, widest = masks = getattr(self, name)
            check(
                count >= 0 and widest >= 0 and bool(count) == bool(widest),
                f"Speech.{name} = {masks} must be the number of masks and the largest width of "
                "one, both above 0; or (0, 0) for none",
            )
        check(
            self.join > 1 or self.join_orders == 1,
            f"Speech.join_orders = {self.join_orders} is the number of orders in which recordings "
            "are joined; set Speech.join above 1, or leave it out",
        )

    @property
    def longest(self) -> int:
        """Number of frames of the longest utterance that is read; 0 means no limit."""
        # Buckets count the frames after `stack`.
        return self.buckets[-1] if self.buckets else 0
