"""Tokenizers of language models: bytes, sentencepiece models, and byte-level BPE."""

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import numpy as np
import sentencepiece

from brt.data import originals, special_tokens, tokenizer_files
from brt.data.byte_level import ByteLevelTokenizer
from brt.data.chunks import ChunkTokenizer, Ids
from brt.errors import ConfigError, DataError

SPACE = "\u2581"  # This character represents a space in the pieces of sentencepiece.


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of the tokenizers of language models."""

    name: str  # the value of Data.tokenizer, without directories
    vocab_size: int  # all ids are below this number
    # The id of BOS, the input from which the first token of a document is predicted; no text
    # contains BOS.
    bos_id: int
    unk_id: int  # the id of text that the tokenizer cannot represent; -1 if it represents all
    special_ids: Mapping[str, int]  # the ids of special tokens, which no text contains, by name
    fingerprint: str  # SHA-256 of everything that determines the ids
    notes: tuple[str, ...]  # what the user should know about the special tokens

    @property
    def beside(self) -> Mapping[str, bytes]:
        """The content of the files beside this file, by name, which are kept with it."""

    @property
    def file(self) -> tuple[str, bytes]:
        """Name and content of a file from which `load` can read the tokenizer."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [T]."""

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        """Divides a text, which is read in `parts` of any length, into chunks for `encode_chunks`.

        No token crosses the end of a chunk, so the ids may differ from those of the whole text.
        """

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        """Returns the ids of each chunk, an int32 array [T]; chunks are encoded in parallel."""

    def decode_bytes(self, ids: Ids) -> bytes:
        """Returns the UTF-8 bytes of ids; those of consecutive parts can be concatenated."""


def encode_prompt(tokenizer: Tokenizer, text: str, special_tokens: bool = False) -> np.ndarray:
    """Returns the ids of a text that somebody gives a model to continue, int32 [T].

    `special_tokens` encodes the names of special tokens, such as <|im_start|>, as these tokens;
    False encodes them as other text, as in documents.
    """
    if not special_tokens:
        return tokenizer.encode(text)
    special = tokenizer.special_ids
    if not special:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} has no special tokens; leave special_tokens out"
        )
    names = sorted(special, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    # The parts with odd indices are the names.
    ids = [[special[p]] if i % 2 else tokenizer.encode(p) for i, p in enumerate(parts) if p]
    return np.concatenate([np.zeros(0, np.int32), *ids]).astype(np.int32)


def decode(tokenizer: Tokenizer, ids: Ids) -> str:
    # Bytes that are not UTF-8 become U+FFFD.
    return tokenizer.decode_bytes(ids).decode("utf-8", "replace")


class StreamDecoder:
    """Decodes a text token by token; a character is returned when its last byte is known.

    `unfinished` are the first bytes of a character that the text before has not completed.
    """

    def __init__(self, tokenizer: Tokenizer, unfinished: bytes = b""):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((unfinished, 0))

    @property
    def unfinished(self) -> bytes:
        """The bytes that the text so far has of an unfinished character."""
        return self._decoder.getstate()[0]

    def decode(self, ids: Ids, *, final: bool = False) -> str:
        """Takes the next ids, and returns the characters that have become complete.

        If no ids follow (`final`), bytes of an incomplete character become U+FFFD.
        """
        return self._decoder.decode(self._tokenizer.decode_bytes(ids), final)


class ByteTokenizer:
    """The tokenizer whose ids are UTF-8 bytes. BOS is NUL, which does not occur in text."""

    name = "bytes"
    vocab_size = 256
    bos_id = 0
    unk_id = -1
    special_ids: Mapping[str, int] = {}
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    file = tokenizer_files.BYTES, b"bytes\n"
    beside: Mapping[str, bytes] = MappingProxyType({})
    notes: tuple[str, ...] = ()

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        return iter(parts)

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        return [*map(self.encode, chunks)]

    def decode_bytes(self, ids: Ids) -> bytes:
        return np.asarray(ids, np.uint8).tobytes()


class SentencePieceTokenizer(ChunkTokenizer):
    """A sentencepiece model, without its dummy prefix and whitespace removal; see `Tokenizer`.

    These would change every chunk of a text. Without them, a model with byte fallback and identity
    normalisation, such as `train_sentencepiece` makes, reproduces every text exactly. A piece never
    crosses the end of a chunk.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name
        content = tokenizer_files.read(self.path)
        self.file, self.beside = ("tokenizer.model", content), originals.read(self.path)
        said = special_tokens.read(self.path, self.beside)
        self._processor, added = self._opened(content, said)
        self.vocab_size = self._processor.vocab_size()
        self.unk_id = self._processor.unk_id()
        # The models of T5 have no BOS. For them, the id of padding is used, because it is the first
        # input of T5's decoders.
        ids = self._processor.bos_id(), self._processor.pad_id()
        default = next((i for i in ids if i >= 0), -1)
        self.bos_id, self.notes = special_tokens.beginning(said, self._id_of, default)
        if self.bos_id < 0:
            raise DataError(f"the tokenizer {path} has no BOS piece; train it with bos_id=1")
        identity = special_tokens.identity(content, self.bos_id, default, added)
        self.fingerprint = hashlib.sha256(identity).hexdigest()
        self._bytes = [_piece_bytes(self._processor, i) for i in range(self.vocab_size)]
        controls = filter(self._processor.is_control, range(self.vocab_size))
        self.special_ids: Mapping[str, int] = {self._processor.id_to_piece(i): i for i in controls}
        spelt = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        has_bytes = all(map(self._processor.is_byte, spelt))
        self._space = np.array(spelt if has_bytes else [self._processor.unk_id()], np.int32)

    def _opened(
        self, content: bytes, said: special_tokens.Statements
    ) -> tuple[sentencepiece.SentencePieceProcessor, list[special_tokens.Added]]:
        """Returns the model with the tokens that other files add to it, and these tokens."""
        model = tokenizer_files.sentencepiece_model(self.path, content, exact=True)
        pieces = {model.id_to_piece(i): i for i in range(model.vocab_size())} if said.added else {}
        added = special_tokens.missing(self.path, said, model.vocab_size(), pieces.get)
        if added:
            longer = tokenizer_files.with_pieces(self.path, content, added)
            model = tokenizer_files.sentencepiece_model(self.path, longer, exact=True)
        return model, added

    def _id_of(self, token: int | str) -> int | None:
        """Returns the id of a piece, or an id of a special token; None for others."""
        if isinstance(token, str):
            i = self._processor.piece_to_id(token)
            return i if self._processor.id_to_piece(i) == token else None
        known = 0 <= token < self.vocab_size
        return token if known and self._processor.is_control(token) else None

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        with tokenizer_files.guarded(self.path):
            if any(SPACE in chunk for chunk in chunks):
                return [*map(self._with_spaces, chunks)]
            return self._processor.encode(chunks, return_type="numpy")

    def _with_spaces(self, chunk: str) -> np.ndarray:
        """Returns the ids of a chunk with ▁, which becomes bytes: its piece stands for a space."""
        first, *others = chunk.split(SPACE)
        found = [self._processor.encode(first, return_type="numpy")]
        for part in others:
            found += [self._space, self._processor.encode(part, return_type="numpy")]
        return np.concatenate(found)


def load(name: str) -> Tokenizer:
    """Loads "bytes", or the tokenizer in a sentencepiece .model or a tokenizer.json."""
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
        return bytes([int(piece[1:-1], 16)])  # The piece of the byte 10 is "<0x0A>".
    return piece.replace(SPACE, " ").encode()
