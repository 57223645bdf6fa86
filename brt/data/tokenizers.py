"""Text to token ids and back: bytes, a sentencepiece model, or byte-level BPE."""

import codecs
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import sentencepiece

from brt.data import tokenizer_files
from brt.data.byte_level import ByteLevelTokenizer
from brt.data.chunks import ChunkTokenizer, Ids
from brt.errors import ConfigError, DataError

SPACE = "\u2581"  # how sentencepiece spells a space


@runtime_checkable
class Tokenizer(Protocol):
    """What the rest of brt knows of a tokenizer.

    Attributes:
      name: what Data.tokenizer says, without directories.
      vocab_size: ids are below it.
      bos_id: the input before a document's first token; never a target.
      unk_id: stands for what the tokenizer cannot spell; -1: it spells everything.
      fingerprint: sha256 of all that decides the ids.
      file: the name of a copy, which `load` reads; its content.
    """

    name: str
    vocab_size: int
    bos_id: int
    unk_id: int
    fingerprint: str

    @property
    def file(self) -> tuple[str, bytes]: ...

    def encode(self, text: str) -> np.ndarray:
        """The ids (int32) of a whole text."""

    def encode_chunks(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """The same ids in parts, of a text that comes in parts."""

    def decode_bytes(self, ids: Ids) -> bytes:
        """The text's UTF-8 bytes; the bytes of parts of `ids` can be joined."""


def decode(tokenizer: Tokenizer, ids: Ids) -> str:
    """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
    return tokenizer.decode_bytes(ids).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes token by token: a character comes out with its last byte."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, ids: Ids, *, final: bool = False) -> str:
        """The text that `ids` complete; with `final`, also of bytes that nothing completed."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids), final)


class ByteTokenizer:
    """UTF-8 bytes are the ids. BOS is NUL, which does not occur in text."""

    name = "bytes"
    vocab_size = 256
    bos_id = 0
    unk_id = -1
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    file = tokenizer_files.BYTES, b"bytes\n"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chunks(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        return map(self.encode, chunks)

    def decode_bytes(self, ids: Ids) -> bytes:
        return np.asarray(ids, np.uint8).tobytes()


class SentencePieceTokenizer(ChunkTokenizer):
    """A sentencepiece model, without its dummy prefix and whitespace removal.

    Those two would act on every chunk. Without them, and with a model that has byte
    fallback and identity normalisation (as `train_sentencepiece` makes), decoding gives
    back the text exactly. A piece never crosses the end of a chunk.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name
        content = tokenizer_files.read(self.path)
        self.file = "tokenizer.model", content
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._processor = tokenizer_files.sentencepiece_model(self.path, content, exact=True)
        self.vocab_size = self._processor.vocab_size()
        # T5's models have no BOS; their decoders start with the padding id.
        self.unk_id = self._processor.unk_id()
        ids = self._processor.bos_id(), self._processor.pad_id()
        self.bos_id = next((i for i in ids if i >= 0), -1)
        if self.bos_id < 0:
            raise DataError(f"the tokenizer {path} has no BOS piece; train it with bos_id=1")
        self._bytes = [_piece_bytes(self._processor, i) for i in range(self.vocab_size)]
        spelt = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        has_bytes = all(map(self._processor.is_byte, spelt))
        self._space = np.array(spelt if has_bytes else [self._processor.unk_id()], np.int32)

    def _encode(self, batch: list[str]) -> Iterator[np.ndarray]:
        if not any(SPACE in text for text in batch):
            yield from self._processor.encode(batch, return_type="numpy")
            return
        for text in batch:  # the character itself, not a space: spelt in bytes
            for i, part in enumerate(text.split(SPACE)):
                if i:
                    yield self._space
                yield self._processor.encode(part, return_type="numpy")


def load(name: str) -> Tokenizer:
    """The tokenizer that `name` names: "bytes", a sentencepiece model or a tokenizer.json.

    Raises:
      DataError: the file is missing, or not what its name says.
      ConfigError: `name` is none of these.
    """
    if name == "bytes" or Path(name).name == tokenizer_files.BYTES:
        return ByteTokenizer()
    if name.endswith(".model"):
        return SentencePieceTokenizer(name)
    if name.endswith(".json"):
        return ByteLevelTokenizer(name)
    raise ConfigError(
        f"Data.tokenizer = '{name}' is none of 'bytes', 'path/to/file.model', "
        "'path/to/tokenizer.json', 'train:VOCAB_SIZE'"
    )


def _piece_bytes(processor: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    piece = processor.id_to_piece(i)
    if processor.is_control(i) or processor.is_unused(i):
        return b""
    if processor.is_unknown(i):
        return "\ufffd".encode()
    if processor.is_byte(i):
        return bytes([int(piece[1:-1], 16)])  # <0x0A>
    return piece.replace(SPACE, " ").encode()
