"""Trains sentencepiece models on documents of any length, without skipping any text."""

import io
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import sentencepiece

from brt.data import chunks
from brt.errors import ConfigError, DataError

# Characters per line of training text; sentencepiece silently drops lines above 4192 bytes.
PIECE = 1024
MAX_BYTES = 200_000_000  # The size of the largest sample of text that is held in memory.
FIXED = 260  # The number of pieces that every vocabulary has: 256 bytes and the special ones.
RESERVED = "\u2585"  # Sentencepiece drops a line that contains this character.


class Coverage(NamedTuple):
    """Number of UTF-8 bytes of text that the training used (`seen`), and that there are
    (`total`).
    """

    seen: int
    total: int

    @property
    def fraction(self) -> float:
        """Share of the text that the training used."""
        return self.seen / self.total


class Special(NamedTuple):
    """Ids of the special pieces of a sentencepiece model; -1 if there is no such piece."""

    unk_id: int
    bos_id: int
    eos_id: int
    pad_id: int


LANGUAGE_MODEL = Special(unk_id=0, bos_id=1, eos_id=-1, pad_id=-1)
T5 = Special(unk_id=2, bos_id=-1, eos_id=1, pad_id=0)


def vocabulary_size(tokenizer: str, setting: str = "Data.tokenizer") -> int | None:
    """Returns N if `tokenizer`, the value of `setting`, is "train:N", and None otherwise."""
    if not tokenizer.startswith("train:"):
        return None
    size = tokenizer.removeprefix("train:")
    if not re.fullmatch("[1-9][0-9]{0,8}", size):
        raise ConfigError(f"{setting} = '{tokenizer}' must name a size, such as train:32000")
    return int(size)


def train_sentencepiece(
    texts: Iterable[Iterable[str]],
    vocab_size: int,
    output: Path,
    *,
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    special: Special = LANGUAGE_MODEL,
    setting: str = "Data.tokenizer",
) -> Coverage:
    """Trains a byte-fallback BPE model that reproduces text exactly, and writes it to `output`.

    With 32000 pieces, training BPE takes an eighth of the time and a quarter of the memory of
    unigram, and BPE compressed a held-out novel 1% better. It encodes about four times slower.

    Args:
      texts: the chunks of each document. If there are more than `max_bytes`, a random sample of
        pieces of up to 1024 characters is used.
      vocab_size: the number of pieces.
      output: the file to write.
      seed: determines the sample.
      max_bytes: the largest size of the sample.
      special: ids of the special pieces.
      setting: the setting that contains "train:VOCAB_SIZE", for error messages.

    Returns:
      The amount of text that the training used, and the amount that there is.

    Raises:
      DataError: there is no text, or too little for `vocab_size`.
    """
    pieces = (piece.encode() for text in texts for piece in chunks.cut(text, PIECE))
    sample, coverage = _sample(pieces, max_bytes, random.Random(seed))
    if not sample:
        raise DataError("there is no text to train a tokenizer on")
    # A vocabulary cannot have more pieces than the text has bytes, besides the fixed ones. The
    # check comes first, because BPE would search for a long time before it fails.
    if vocab_size > coverage.seen + FIXED:
        raise _too_many(f"{setting} = 'train:{vocab_size}'", coverage.seen + FIXED)
    try:
        model = _train(iter(sample), vocab_size, special)
    except RuntimeError as error:
        raise _explained(error, f"{setting} = 'train:{vocab_size}'") from error
    output.write_bytes(model)
    return coverage


def _sample(
    pieces: Iterable[bytes], max_bytes: int, rng: random.Random
) -> tuple[list[bytes], Coverage]:
    """Samples at most `max_bytes` of the pieces, with equal probability, in one pass."""
    sample: list[tuple[float, bytes]] = []
    seen = total = 0
    threshold = 1.0
    for piece in pieces:
        total += len(piece)
        draw = rng.random()
        if draw < threshold:
            sample.append((draw, piece))
            seen += len(piece)
        while seen > max_bytes:
            threshold /= 2
            sample = [(draw, piece) for draw, piece in sample if draw < threshold]
            seen = sum(len(piece) for _, piece in sample)
    return [piece for _, piece in sample], Coverage(seen, total)


def _train(pieces: Iterator[bytes], vocab_size: int, special: Special) -> bytes:
    model = io.BytesIO()
    reserved = RESERVED.encode()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(piece.replace(reserved, b" ") for piece in pieces),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        user_defined_symbols=["\n"],
        allow_whitespace_only_pieces=True,  # Indentation becomes a single piece.
        **special._asdict(),
        max_sentence_length=4 * PIECE,
        num_threads=1,  # The model file records the number, so another one changes the fingerprint.
        minloglevel=2,
    )
    return model.getvalue()


def _too_many(binding: str, limit: int) -> DataError:
    return DataError(
        f"{binding} asks for more pieces than this corpus yields; use train:{limit} or less"
    )


def _explained(error: RuntimeError, binding: str) -> Exception:
    if limit := re.search(r"value <= (\d+)", str(error)):
        return _too_many(binding, int(limit[1]))
    if limit := re.search(r"required_chars\. \d+ vs (\d+)", str(error)):
        return DataError(
            f"{binding} is too small for the bytes and characters "
            f"of this corpus; use at least train:{limit[1]}"
        )
    return error
