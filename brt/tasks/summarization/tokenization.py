"""Tokenizers of whole texts, with the special ids that an encoder-decoder needs.

The tokenizers of this module encode as the authors of T5 and BART did, so that pretrained weights
can be used. The tokenizers of `brt.data.tokenizers` are different: they read documents of any
length in chunks, and reproduce every byte.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import originals, tokenizer_files
from brt.data.tokenizers import Ids
from brt.errors import DataError

START, END, PAD = "<s>", "</s>", "<pad>"  # The tokenizers of T5 and BART use these names.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairTokenizer:
    """A tokenizer for encoder-decoders, with special ids."""

    name: str  # value of Data.tokenizer, without directories
    fingerprint: str
    content: bytes = dataclasses.field(repr=False)  # content of the tokenizer's file
    # The content of further files, by name, that are kept with the tokenizer's file.
    beside: Mapping[str, bytes] = dataclasses.field(repr=False, default_factory=dict)
    # Number of ids. A pretrained checkpoint may have more, because its embedding can have padding
    # rows and the 100 extra ids of T5, which are not in spiece.model.
    vocab_size: int
    pad_id: int
    eos_id: int  # the last id of every text
    decoder_start_id: int  # first input of the decoder: pad_id for T5, eos_id for BART
    begin: tuple[int, ...]  # ids before every text: none for T5, `<s>` for BART
    # Id that stands for text which cannot be encoded. It is -1 if the tokenizer has no such id, and
    # for every tokenizer.json, because brt does not look the id up in such a file.
    unk_id: int = -1
    # `encode_all` returns the ids of each text, and `decode_ids` returns the text of ids. These ids
    # do not include special ids.
    encode_all: Callable[[list[str]], list[Any]] = dataclasses.field(repr=False)
    decode_ids: Callable[[list[int]], str] = dataclasses.field(repr=False)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 [T], without special ids."""
        with tokenizer_files.guarded(self.name):
            encoded = [np.asarray(ids, np.int32) for ids in self.encode_all(list(texts))]
        # The name of a special token in a text, such as </s>, must not become the special id. Some
        # tokenizer.json files encode the name as this id nevertheless, so special ids are removed.
        return [ids[~np.isin(ids, list(self._special))] for ids in encoded]

    def decode(self, ids: Ids) -> str:
        """Returns the text of `ids`, without special and unknown ids."""
        known = [int(i) for i in ids if i < self.vocab_size and int(i) not in self._special]
        with tokenizer_files.guarded(self.name, "cannot decode a text"):
            return self.decode_ids(known)

    @property
    def file(self) -> tuple[str, bytes]:
        return f"tokenizer{Path(self.name).suffix}", self.content

    @property
    def _special(self) -> set[int]:
        return {self.pad_id, self.eos_id, *self.begin}


def load(path: str) -> PairTokenizer:
    """Loads a sentencepiece .model, or a tokenizer.json of Hugging Face.

    Raises DataError if the file is missing or damaged, or has no end or padding token.
    """
    readers = {".model": partial(_opened, _sentencepiece), ".json": partial(_opened, _json)}
    return tokenizer_files.load(path, readers)


def _opened(describe: Callable[[Path, bytes], dict[str, Any]], file: Path) -> PairTokenizer:
    content = tokenizer_files.read(file)
    return PairTokenizer(
        name=file.name, fingerprint=hashlib.sha256(content).hexdigest(), content=content,
        beside=originals.read(file), **describe(file, content),
    )  # fmt: skip


def _sentencepiece(path: Path, content: bytes) -> dict[str, Any]:
    processor = tokenizer_files.sentencepiece_model(path, content)
    pad = _required(path, processor.pad_id(), "padding", PAD)
    end = _required(path, processor.eos_id(), "end", END)
    return dict(
        vocab_size=processor.vocab_size(), pad_id=pad, eos_id=end, decoder_start_id=pad, begin=(),
        unk_id=processor.unk_id(), encode_all=processor.encode, decode_ids=processor.decode,
    )  # fmt: skip


def _json(path: Path, content: bytes) -> dict[str, Any]:
    tokenizer = tokenizer_files.json_model(path, content)
    with tokenizer_files.guarded(path):
        begin, end_id = _template(path, tokenizer)
    pad = _required(path, tokenizer.token_to_id(PAD), "padding", PAD)
    end = _required(path, end_id, "end", END)

    def encode(texts: list[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return dict(
        vocab_size=tokenizer.get_vocab_size(), pad_id=pad, eos_id=end,
        decoder_start_id=end if begin else pad, begin=begin, encode_all=encode,
        decode_ids=tokenizer.decode,
    )  # fmt: skip


def _template(path: Path, tokenizer: Any) -> tuple[tuple[int, ...], int | None]:
    """Returns the ids that a tokenizer.json puts before a text, and the id that ends a text.

    If the tokenizer puts no ids around a text, the second result is the id of "</s>". It is None if
    this token does not exist, or if the tokenizer puts ids before a text only.
    """
    wrapped = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    if len(wrapped) == len(bare):  # The tokenizer puts no special ids before or after a text.
        return (), tokenizer.token_to_id(END)
    start = next(i for i in range(len(wrapped)) if wrapped[i : i + len(bare)] == bare)
    after = wrapped[start + len(bare) :]
    if len(after) > 1:
        raise DataError(f"the tokenizer {path} ends a text with {len(after)} ids, not with one")
    return tuple(wrapped[:start]), after[0] if after else None


def _required(path: Path, id: int | None, what: str, piece: str) -> int:
    if id is None or id < 0:
        raise DataError(
            f"the tokenizer {path} has no {what} token {piece}; train one that has it with "
            "Data.tokenizer = 'train:VOCAB_SIZE'"
        )
    return id
