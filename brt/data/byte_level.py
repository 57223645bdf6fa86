"""Byte-level BPE from a tokenizer.json, as GPT-2 and RoBERTa have it: every byte is kept."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from brt.data import tokenizer_files
from brt.data.chunks import ChunkTokenizer
from brt.errors import DataError

START = ("<s>", "<|endoftext|>", "[CLS]", "<bos>")  # how files spell a document's beginning
MASK = "<mask>"


class ByteLevelTokenizer(ChunkTokenizer):
    """Ids of RoBERTa's kind of file, without special ones; see `tokenizers.Tokenizer`.

    Where the file's last id is its mask's, that is no id of a text: `vocab_size` ends before it,
    and a masked language model takes it for its own mask.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name
        content = tokenizer_files.read(self.path)
        self.file = "tokenizer.json", content
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._tokenizer = _opened(self.path, content)
        size = self._tokenizer.get_vocab_size()
        self.vocab_size = size - (self._tokenizer.token_to_id(MASK) == size - 1)
        ids = (self._tokenizer.token_to_id(piece) for piece in START)
        self.bos_id = next((i for i in ids if i is not None), -1)
        if self.bos_id < 0:
            raise DataError(f"the tokenizer {path} has none of the pieces {', '.join(START)}")
        added = self._tokenizer.get_added_tokens_decoder()
        self._bytes = [
            b"" if i in added else _bytes_of(self._tokenizer.id_to_token(i)) for i in range(size)
        ]

    def _encode(self, batch: list[str]) -> Iterator[np.ndarray]:
        for found in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield np.asarray(found.ids, np.int32)


def _opened(path: Path, content: bytes) -> Any:
    tokenizer = tokenizer_files.json_model(path, content)
    settings = json.loads(content)
    before, after = settings.get("pre_tokenizer") or {}, settings.get("decoder") or {}
    if settings.get("normalizer") or {before.get("type"), after.get("type")} != {"ByteLevel"}:
        raise DataError(
            f"the tokenizer {path} does not keep every byte of a text; only byte-level BPE without "
            "a normalizer does, such as RoBERTa's"
        )
    tokenizer.pre_tokenizer.add_prefix_space = False  # it would act on every chunk
    return tokenizer


def _bytes_of(piece: str) -> bytes:
    """Of a piece that is spelt as GPT-2 does (Radford et al. 2019, section 2.2)."""
    return bytes(SPELT[character] for character in piece)


def _spelt() -> dict[str, int]:
    """{character: byte}: a printable byte is itself, the others are numbered from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


SPELT = _spelt()
