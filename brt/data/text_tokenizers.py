"""Tokenizes texts for encoders: ids, the characters that each id stands for, and special ids.

A text is encoded as `begin text end`, and a pair of texts as `begin text between text end`. For
RoBERTa, a pair is `<s> text </s></s> text </s>`. If the file of a tokenizer lacks special ids, they
are added after the ids of the file.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from brt.data import originals, tokenizer_files
from brt.data.tokenizer_training import Special

ROBERTA = Special(unk_id=3, bos_id=0, eos_id=2, pad_id=1)
START, END, PAD = ("<s>", "[CLS]"), ("</s>", "[SEP]"), ("<pad>", "[PAD]")


class Encoding(NamedTuple):
    """The ids of a text, with the characters that each id stands for."""

    ids: Int[np.ndarray, " T"]
    # For each id, the position of its first character, and the position after its last character.
    spans: Int[np.ndarray, "T 2"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextTokenizer:
    """A tokenizer for encoders, with the special ids at the ends of a text and between texts."""

    name: str  # the value of the setting that names the tokenizer, without directories
    fingerprint: str  # SHA-256 of everything that determines the ids of a text
    # Name and content of a file from which `load` can read the tokenizer.
    file: tuple[str, bytes] = dataclasses.field(repr=False)
    vocab_size: int  # all ids, including the special ids, are below this number
    begin: tuple[int, ...]
    between: tuple[int, ...]
    end: tuple[int, ...]
    pad_id: int
    encode_texts: Callable[[list[str]], list[Encoding]] = dataclasses.field(repr=False)
    # Returns the text of ids that contain no special id.
    decode_ids: Callable[[list[int]], str] = dataclasses.field(repr=False)
    # The content, by name, of the files that brt keeps beside `file`.
    beside: Mapping[str, bytes] = dataclasses.field(repr=False, default_factory=dict)

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Returns the encoding of each text, without special ids, even if a text contains "<s>"."""
        special = [*self.begin, *self.between, *self.end, self.pad_id]
        encodings = []
        with tokenizer_files.guarded(self.name):
            encoded = self.encode_texts(list(texts))
        for ids, spans in encoded:
            ordinary = ~np.isin(ids, special)
            encodings.append(Encoding(ids[ordinary], spans[ordinary]))
        return encodings

    def texts(self, ids: Int[np.ndarray, " T"]) -> list[str]:
        """Decodes the ids of one or two texts, as `wrap` returns them, to a list of the texts."""
        around = [*self.begin, *self.between, *self.end, self.pad_id]
        parts = np.split(ids, np.flatnonzero(np.diff(np.isin(ids, around))) + 1)
        with tokenizer_files.guarded(self.name, "cannot decode a text"):
            return [self.decode_ids(part.tolist()) for part in parts if part[0] not in around]

    def wrap(self, *texts: np.ndarray) -> Int[np.ndarray, " T"]:
        """Concatenates the ids of one or two texts, with special ids before, between and after."""
        parts: list[Sequence[int] | np.ndarray] = [self.between] * (2 * len(texts) - 1)
        parts[::2] = texts
        return np.concatenate([self.begin, *parts, self.end]).astype(np.int32)

    def special_count(self, count: int) -> int:
        """Returns the number of special ids that `wrap` adds to `count` texts."""
        return len(self.begin) + (count - 1) * len(self.between) + len(self.end)


def load(name: str) -> TextTokenizer:
    """Loads "bytes", or the tokenizer in a sentencepiece .model or a tokenizer.json."""
    return tokenizer_files.load(name, {"bytes": _bytes, ".model": _sentencepiece, ".json": _json})


def _bytes(path: Path) -> TextTokenizer:
    def encode_texts(texts: list[str]) -> list[Encoding]:
        encodings = []
        for text in texts:
            ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
            places = np.repeat(np.arange(len(text)), [len(c.encode()) for c in text])
            encodings.append(Encoding(ids, np.stack([places, places + 1], axis=1).astype(np.int32)))
        return encodings

    def decode_ids(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    described = b"bytes of a text, between special ids"
    loaded = _with_special(Path("bytes"), described, 256, encode_texts, decode_ids, beside={})
    return dataclasses.replace(loaded, file=(tokenizer_files.BYTES, b"bytes\n"))


def _sentencepiece(path: Path) -> TextTokenizer:
    content = tokenizer_files.read(path)
    processor = tokenizer_files.sentencepiece_model(path, content)

    def encode_texts(texts: list[str]) -> list[Encoding]:
        rows = processor.encode(texts, return_type="offset_mapping")
        return [_spelt(row["ids"], row["offsets"]) for row in rows]

    special = [processor.bos_id(), processor.eos_id(), processor.pad_id()]
    return _with_special(
        path, content, processor.vocab_size(), encode_texts, processor.decode,
        [i if i >= 0 else None for i in special],
    )  # fmt: skip


def _json(path: Path) -> TextTokenizer:
    content = tokenizer_files.read(path)
    tokenizer = tokenizer_files.json_model(path, content)

    def encode_texts(texts: list[str]) -> list[Encoding]:
        rows = tokenizer.encode_batch(texts, add_special_tokens=False)
        return [_spelt(row.ids, row.offsets) for row in rows]

    ids = [
        next((i for piece in pieces if (i := tokenizer.token_to_id(piece)) is not None), None)
        for pieces in (START, END, PAD)
    ]
    size = tokenizer.get_vocab_size()
    loaded = _with_special(path, content, size, encode_texts, tokenizer.decode, ids)
    with tokenizer_files.guarded(path):
        template = _template(tokenizer)
    return dataclasses.replace(loaded, **template or {})


def _template(tokenizer: Any) -> dict[str, tuple[int, ...]] | None:
    """Returns the special ids "begin", "between" and "end" of the template for a pair of texts."""
    # Returns None if the file has no such template; RoBERTa's is then used.
    encoding = tokenizer.encode("a", "b")
    special, kinds = np.array(encoding.special_tokens_mask, bool), np.array(encoding.ids)
    if not special.any():
        return None
    text = np.flatnonzero(~special)
    (cuts,) = np.nonzero(np.diff(text) > 1)
    if len(cuts) != 1:
        return None
    last, first = text[cuts[0]], text[cuts[0] + 1]
    places = {"begin": slice(0, text[0]), "between": slice(last + 1, first),
              "end": slice(text[-1] + 1, None)}  # fmt: skip
    parts = {name: tuple(kinds[place].tolist()) for name, place in places.items()}
    return parts if parts["begin"] and parts["end"] else None


def _spelt(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Encoding:
    return Encoding(np.array(ids, np.int32), np.array(spans, np.int32).reshape(-1, 2))


def _with_special(
    path: Path,
    content: bytes,
    size: int,
    encode_texts: Callable[[list[str]], list[Encoding]],
    decode_ids: Callable[[list[int]], str],
    special: Sequence[int | None] = (None, None, None),
    beside: Mapping[str, bytes] | None = None,
) -> TextTokenizer:
    """Returns the tokenizer of a file with this `content` and `size` ids, with RoBERTa's template.

    `special` has the id before a text, the id after a text, and the id of padding. If one is None,
    a new id is added after the ids of the file. If `beside` is None, the files beside `path` are
    read.
    """
    known: list[int] = []
    for id in special:
        known.append(size if id is None else id)
        size += id is None
    begin, end, pad = known
    return TextTokenizer(
        name=path.name, fingerprint=hashlib.sha256(content).hexdigest(),
        file=(f"tokenizer{path.suffix}", content), vocab_size=size,
        begin=(begin,), between=(end, end), end=(end,), pad_id=pad,
        encode_texts=encode_texts, decode_ids=decode_ids,
        beside=originals.read(path) if beside is None else beside,
    )  # fmt: skip
