"""Whole texts to ids and back, with the ids that an encoder-decoder needs.

Unlike `brt.data.tokenizers`, which reads documents of any length in chunks and gives back
every byte, these do what the model's makers did: the same ids as pretrained weights know.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import tokenizer_files
from brt.data.chunks import Ids
from brt.errors import ConfigError, DataError

START, END, PAD = "<s>", "</s>", "<pad>"  # how T5 and BART spell them


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PairTokenizer:
    """A tokenizer with its special ids.

    Attributes:
      name: what Pairs.tokenizer says, without directories.
      fingerprint: sha256 of all that decides the ids.
      content: the file's.
      vocab_size: ids are below it. The 100 extra ids of T5 and padding rows of a checkpoint's
        embedding are in no spiece.model: a checkpoint may know more ids.
      pad_id: what fills a batch.
      eos_id: the last id of every text.
      decoder_start_id: the decoder's first input. T5: pad_id; BART: eos_id.
      begin: ids before every text. T5: none; BART: its `<s>`.
      unk_id: stands for what cannot be spelt; -1: there is none.
    """

    name: str
    fingerprint: str
    content: bytes = dataclasses.field(repr=False)
    vocab_size: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    begin: tuple[int, ...]
    unk_id: int = -1
    encode_all: Callable[[list[str]], list[Any]] = dataclasses.field(repr=False)
    decode_ids: Callable[[list[int]], str] = dataclasses.field(repr=False)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (int32) of each text, without special ones; texts are encoded in parallel."""
        found = (np.asarray(ids, np.int32) for ids in self.encode_all(list(texts)))
        # Some models of tokenizer.json find `</s>` in a text although they were told not to.
        return [ids[~np.isin(ids, list(self._special))] for ids in found]

    def decode(self, ids: Ids) -> str:
        """The text of `ids`, without special ones and those that the file does not know."""
        known = [int(i) for i in ids if i < self.vocab_size and int(i) not in self._special]
        return self.decode_ids(known)

    @property
    def file(self) -> tuple[str, bytes]:
        """The name of a copy; its content."""
        return f"tokenizer{Path(self.name).suffix}", self.content

    @property
    def _special(self) -> set[int]:
        return {self.pad_id, self.eos_id, *self.begin}


def load(path: str) -> PairTokenizer:
    """Opens a sentencepiece .model, or a tokenizer.json of Hugging Face's tokenizers.

    Raises:
      DataError: the file is missing or damaged, or has no end or padding token.
      ConfigError: `path` has another ending.
    """
    if path.endswith(".model"):
        return _sentencepiece(Path(path))
    if path.endswith(".json"):
        return _json(Path(path))
    raise ConfigError(
        f"Pairs.tokenizer = '{path}' is none of 'path/to/spiece.model', 'path/to/tokenizer.json', "
        "'train:VOCAB_SIZE'"
    )


def _sentencepiece(path: Path) -> PairTokenizer:
    content = tokenizer_files.read(path)
    processor = tokenizer_files.sentencepiece_model(path, content)
    pad = _required(path, processor.pad_id(), "padding", PAD)
    end = _required(path, processor.eos_id(), "end", END)
    return PairTokenizer(
        name=path.name, fingerprint=hashlib.sha256(content).hexdigest(), content=content,
        vocab_size=processor.vocab_size(), pad_id=pad, eos_id=end, decoder_start_id=pad, begin=(),
        unk_id=processor.unk_id(),
        encode_all=processor.encode, decode_ids=processor.decode,
    )  # fmt: skip


def _json(path: Path) -> PairTokenizer:
    content = tokenizer_files.read(path)
    tokenizer = tokenizer_files.json_model(path, content)
    begin, behind = _wrapping(path, tokenizer)
    pad = _required(path, tokenizer.token_to_id(PAD), "padding", PAD)
    end = _required(path, behind, "end", END)

    def encode(texts: list[str]) -> list[list[int]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in found]

    return PairTokenizer(
        name=path.name, fingerprint=hashlib.sha256(content).hexdigest(), content=content,
        vocab_size=tokenizer.get_vocab_size(), pad_id=pad, eos_id=end,
        decoder_start_id=end if begin else pad, begin=begin, encode_all=encode,
        decode_ids=tokenizer.decode,
    )  # fmt: skip


def _wrapping(path: Path, tokenizer: Any) -> tuple[tuple[int, ...], int | None]:
    """The ids that the file's template puts before a text, and the one behind it."""
    wrapped = tokenizer.encode("a").ids
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    if len(wrapped) == len(bare):  # no template
        return (), tokenizer.token_to_id(END)
    place = next(i for i in range(len(wrapped)) if wrapped[i : i + len(bare)] == bare)
    behind = wrapped[place + len(bare) :]
    if len(behind) > 1:
        raise DataError(f"the tokenizer {path} ends a text with {len(behind)} ids, not with one")
    return tuple(wrapped[:place]), behind[0] if behind else None


def _required(path: Path, found: int | None, what: str, piece: str) -> int:
    if found is None or found < 0:
        raise DataError(
            f"the tokenizer {path} has no {what} token {piece}; train one that has it with "
            "Pairs.tokenizer = 'train:VOCAB_SIZE'"
        )
    return found
