"""Tokenizers of language models: bytes, sentencepiece models, and byte-level BPE.

Documents may be larger than the memory, so text is encoded in chunks. `cut` chooses the ends of the
chunks so that they depend on the text only, and not on the sizes of the parts in which the text is
read.

Byte-level BPE, as used by GPT-2 and RoBERTa, is read from a tokenizer.json. It represents every
byte of a text, so that decoding returns the text exactly. Files whose settings would change texts
are refused; only the normalizer NFC is accepted.
"""

import abc
import codecs
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from brt import untrusted
from brt.data import originals, special_tokens, tokenizer_files
from brt.data.special_tokens import Added
from brt.errors import ConfigError, DataError

# A chunk has at most this number of characters, because sentencepiece is slow on longer chunks.
CHUNK = 4096

Ids = Sequence[int | np.integer] | np.ndarray


def end_of_line(text: str, start: int, stop: int) -> int:
    """Returns where the chunk that begins at index `start` ends, which is at most `stop`.

    The chunk ends after the last newline before `stop`. Without a newline, it ends before the last
    space; if several spaces stand there in a row, it ends before the first of them. Without a
    space, it ends at `stop`.
    """
    newline = text.rfind("\n", start, stop)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", start + 1, stop)
    while space > start and text[space - 1] == " ":
        space -= 1
    return space if space > start else stop


def end_of_word(text: str, start: int, stop: int) -> int:
    """Returns where a chunk ends, like `end_of_line`, but at a space between letters if possible.

    The pre-tokenizers of all byte-level tokenizers cut a text at a space between two ASCII letters,
    whatever text precedes and follows, so the end of the chunk does not change the ids. The chunk
    ends before the last of these spaces that lies before `stop`. If there is none, it ends where
    `end_of_line` says. `text` must have a character at `stop`.
    """
    space = stop
    while (space := text.rfind(" ", start + 1, space)) >= 0:
        around = text[space - 1] + text[space + 1]
        if around.isascii() and around.isalpha():
            return space
    return end_of_line(text, start, stop)


def cut(
    chunks: Iterable[str], size: int, end: Callable[[str, int, int], int] = end_of_line
) -> Iterator[str]:
    """Cuts a text, read in parts, into chunks of at most `size` characters.

    `end` returns the end of a chunk, as `end_of_line` does.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > size:
            stop = end(text, start, start + size)
            yield text[start:stop]
            start = stop
        text = text[start:]
    if text:
        yield text


class Tokenizer(abc.ABC):
    """Base class of the tokenizers of language models.

    A subclass defines `encode_chunks`, and the bytes `_bytes` that each id stands for. It may also
    set `_chunk_end`, the function that determines where chunks end (see `cut`).
    """

    name: str  # the value of Data.tokenizer, without directories
    vocab_size: int  # all ids are below this number
    # The id of BOS, the input from which the first token of a document is predicted; no text
    # contains BOS.
    bos_id: int
    unk_id: int  # the id of text that the tokenizer cannot represent; -1 if it represents all
    special_ids: Mapping[str, int] = {}  # the ids of special tokens, which no text contains
    fingerprint: str  # SHA-256 of everything that determines the ids
    notes: tuple[str, ...] = ()  # what the user should know about the special tokens
    file: tuple[str, bytes]  # name and content of a file from which `load` can read the tokenizer
    beside: Mapping[str, bytes] = {}  # the content of the files beside `file`, by name
    _bytes: list[bytes]
    _chunk_end: staticmethod = staticmethod(end_of_line)

    @abc.abstractmethod
    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        """Returns the ids of each chunk, an int32 array [T]; chunks are encoded in parallel."""

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        """Divides a text, which is read in `parts` of any length, into chunks for `encode_chunks`.

        No token crosses the end of a chunk, so the ids may differ from those that the whole text
        would get if it were encoded at once.
        """
        return cut(parts, CHUNK, self._chunk_end)

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32 [T]."""
        chunks = [*self.cut([text])]
        return np.concatenate([np.zeros(0, np.int32), *self.encode_chunks(chunks)])

    def decode_bytes(self, ids: Ids) -> bytes:
        """Returns the UTF-8 bytes of ids; the bytes of consecutive ids can be concatenated."""
        pool, starts, lengths = self._pool
        ids = np.asarray(ids, np.int64)
        sizes = lengths[ids]
        ends = np.cumsum(sizes)
        # For each byte of the result, `source` is the index of the byte in the pool.
        source = np.repeat(starts[ids] - ends + sizes, sizes)
        source += np.arange(len(source))
        return pool[source].tobytes()

    @functools.cached_property
    def _pool(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The bytes of all ids, uint8 [bytes], and the start and the length of each id's bytes."""
        lengths = np.array([*map(len, self._bytes)], np.int64)
        return np.frombuffer(b"".join(self._bytes), np.uint8), np.cumsum(lengths) - lengths, lengths

    def _read(self, path: Path, stored: str) -> bytes:
        """Returns the content of a tokenizer's file; sets `path`, `name`, `file` and `beside`.

        `stored` is the name under which brt stores the file.
        """
        content = tokenizer_files.read(path)
        self.path, self.name = path, path.name
        self.file, self.beside = (stored, content), originals.read(path)
        return content

    def _begin(self, said: special_tokens.Statements, default: int, added: list[Added]) -> int:
        """Sets `bos_id`, `notes` and `fingerprint`, and returns `bos_id`.

        `said` is what files say of special tokens. If they name no BOS, `bos_id` is `default`; -1
        stands for no BOS. `added` are the tokens that the tokenizer's own file lacks.
        """
        self.bos_id, self.notes = special_tokens.beginning(said, self._id_of, default)
        identity = special_tokens.identity(self.file[1], self.bos_id, default, added)
        self.fingerprint = hashlib.sha256(identity).hexdigest()
        return self.bos_id

    def _id_of(self, token: int | str) -> int | None:
        """Returns the id of the piece `token`, or `token` itself if it is a special token's id.

        Returns None if the tokenizer has no such piece or special token.
        """
        raise NotImplementedError


class ByteTokenizer(Tokenizer):
    """The tokenizer whose ids are UTF-8 bytes. BOS is NUL, which does not occur in text."""

    name = "bytes"
    vocab_size = 256
    bos_id = 0
    unk_id = -1
    fingerprint = hashlib.sha256(b"bytes").hexdigest()
    file = tokenizer_files.BYTES, b"bytes\n"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def cut(self, parts: Iterable[str]) -> Iterator[str]:
        return iter(parts)

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        return [*map(self.encode, chunks)]

    def decode_bytes(self, ids: Ids) -> bytes:
        return np.asarray(ids, np.uint8).tobytes()


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

    `unfinished` are the bytes of an incomplete character at the end of the preceding text.
    """

    def __init__(self, tokenizer: Tokenizer, unfinished: bytes = b""):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((unfinished, 0))

    @property
    def unfinished(self) -> bytes:
        """The bytes of an incomplete character at the end of the text so far; b"" for none."""
        return self._decoder.getstate()[0]

    def decode(self, ids: Ids, *, final: bool = False) -> str:
        """Takes the next ids, and returns the characters that have become complete.

        If no ids follow (`final`), bytes of an incomplete character become U+FFFD.
        """
        return self._decoder.decode(self._tokenizer.decode_bytes(ids), final)


SPACE = "\u2581"  # This character represents a space in the pieces of sentencepiece.


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, without its dummy prefix and whitespace removal; see `Tokenizer`.

    The prefix and the removal would change every chunk of a text. Without them, a model with byte
    fallback and identity normalisation, such as `train_sentencepiece` makes, reproduces every text
    exactly. A piece never crosses the end of a chunk.
    """

    def __init__(self, path: Path | str):
        content = self._read(Path(path), "tokenizer.model")
        said = special_tokens.read(self.path, self.beside)
        self._processor, added = self._opened(content, said)
        self.vocab_size = self._processor.vocab_size()
        self.unk_id = self._processor.unk_id()
        # The models of T5 have no BOS. For them, the id of padding is used, because it is the first
        # input of T5's decoders.
        ids = self._processor.bos_id(), self._processor.pad_id()
        default = next((i for i in ids if i >= 0), -1)
        if self._begin(said, default, added) < 0:
            raise DataError(f"the tokenizer {path} has no BOS piece; train it with bos_id=1")
        self._bytes = [_piece_bytes(self._processor, i) for i in range(self.vocab_size)]
        controls = filter(self._processor.is_control, range(self.vocab_size))
        named = {token.piece: token.token for token in said.added if token.special}
        self.special_ids: Mapping[str, int] = {
            **{self._processor.id_to_piece(i): i for i in controls}, **named
        }  # fmt: skip
        spelt = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        has_bytes = all(map(self._processor.is_byte, spelt))
        self._space = np.array(spelt if has_bytes else [self._processor.unk_id()], np.int32)

    def _opened(
        self, content: bytes, said: special_tokens.Statements
    ) -> tuple[sentencepiece.SentencePieceProcessor, list[Added]]:
        """Returns the model with the tokens that other files add to it, and these tokens."""
        model = tokenizer_files.sentencepiece_model(self.path, content, exact=True)
        pieces = {model.id_to_piece(i): i for i in range(model.vocab_size())} if said.added else {}
        added = special_tokens.missing(self.path, said, model.vocab_size(), pieces.get)
        if added:
            longer = tokenizer_files.with_pieces(self.path, content, added)
            model = tokenizer_files.sentencepiece_model(self.path, longer, exact=True)
        return model, added

    def _id_of(self, token: int | str) -> int | None:
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
        """Returns the ids of a chunk that contains the character ▁.

        This character is encoded as bytes, because the piece ▁ stands for a space.
        """
        first, *others = chunk.split(SPACE)
        found = [self._processor.encode(first, return_type="numpy")]
        for part in others:
            found += [self._space, self._processor.encode(part, return_type="numpy")]
        return np.concatenate(found)


def _piece_bytes(processor: sentencepiece.SentencePieceProcessor, i: int) -> bytes:
    piece = processor.id_to_piece(i)
    if processor.is_control(i) or processor.is_unused(i):
        return b""
    if processor.is_unknown(i):
        return "\ufffd".encode()
    if processor.is_byte(i):
        return bytes([int(piece[1:-1], 16)])  # The piece of the byte 10 is "<0x0A>".
    return piece.replace(SPACE, " ").encode()


# A tokenizer.json with one of these settings is refused, because the settings change the text.
CHANGING = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
MASK = "<mask>"
# A tokenizer is refused if it does not decode the ids of this text to the same text.
PROBE = "Ab 12,\n\n\t  – é 山 \U0001f600\r\n"
_SETTINGS = {
    "model": dict, "normalizer?": dict | None, "pre_tokenizer?": dict | None,
    "decoder?": dict | None,
}  # fmt: skip
# These bytes occur in hardly any text: control characters, and the first bytes of characters in
# planes of Unicode that are hardly used. A tokenizer may lack pieces for these bytes, and then
# refuses texts that contain them.
RARE = {bytes([byte]) for byte in (*range(9), 11, 12, *range(14, 32), 0x7F, 0xF1, 0xF2, 0xF3, 0xF4)}
# These bytes never occur in UTF-8, so a tokenizer needs no pieces for them.
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}


class ByteLevelTokenizer(Tokenizer):
    """A byte-level BPE tokenizer, which adds no special ids to a text; see `Tokenizer`.

    If the last id of the file is the mask token, `vocab_size` does not include this id, because no
    text is encoded with it. A masked language model uses the id to mask tokens. A tokenizer.json
    that is damaged, has no piece for BOS, or does not keep every byte of a text raises DataError.
    """

    _chunk_end = staticmethod(end_of_word)

    def __init__(self, path: Path | str):
        content = self._read(Path(path), "tokenizer.json")
        settings = _settings(self.path, content)
        said = special_tokens.read(self.path, self.beside, settings)
        self._tokenizer = _opened(self.path, content, settings)
        added = _add_missing(self.path, self._tokenizer, said)
        # Texts with a byte that has no piece are refused, so the tokenizer needs no unknown token.
        self.unk_id = -1
        size = self._tokenizer.get_vocab_size()
        self.vocab_size = size - (self._tokenizer.token_to_id(MASK) == size - 1)
        known = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in known.items() if token.special}
        self.special_ids: Mapping[str, int] = special
        self._bytes = [
            _bytes_of(path, self._tokenizer.id_to_token(i), known.get(i)) for i in range(size)
        ]
        ids = (self._tokenizer.token_to_id(piece) for piece in special_tokens.START)
        default = next((i for i in ids if i is not None), -1)
        if self._begin(said, default, added) < 0:
            raise DataError(
                f"the tokenizer {path} has none of the pieces {', '.join(special_tokens.START)}; "
                "name its bos_token in a tokenizer_config.json beside it"
            )
        pieces = {*self._bytes}
        self._missing = bytes(b for b in range(256) if b not in NEVER and bytes([b]) not in pieces)
        missing = {bytes([byte]) for byte in self._missing} - RARE
        if missing:
            raise _loses(
                path, f": no piece is {min(missing)!r}, nor {len(missing) - 1} other bytes"
            )

        if self.decode_bytes(self.encode(PROBE)) != PROBE.encode():
            raise _loses(path, f": {PROBE[:9]!r}... is decoded to another text")

    def encode_chunks(self, chunks: list[str]) -> list[np.ndarray]:
        if self._missing:
            self._check_bytes(chunks)
        with tokenizer_files.guarded(self.path):
            encoded = self._tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encoded]

    def _id_of(self, token: int | str) -> int | None:
        named = isinstance(token, str)
        i: Any = self._tokenizer.token_to_id(token) if named else token
        if i is None or not 0 <= i < self.vocab_size:
            return None
        known = named or self._tokenizer.id_to_token(i) in special_tokens.START
        return i if known or not self._bytes[i] else None

    def _check_bytes(self, texts: list[str]) -> None:
        """Refuses texts with bytes that have no piece, because they would be dropped silently."""
        for text in texts:
            data = text.encode()
            if len(data.translate(None, self._missing)) < len(data):
                byte = next(byte for byte in data if byte in self._missing)
                raise DataError(
                    f"the tokenizer {self.path} has no piece for the byte 0x{byte:02x}, which a "
                    "text has; remove this character from the text"
                )


def _add_missing(path: Path, tokenizer: Any, said: special_tokens.Statements) -> list[Added]:
    """Adds to a tokenizer those tokens that only other files name, and returns these tokens."""
    from tokenizers import AddedToken

    size = tokenizer.get_vocab_size()
    missing = special_tokens.missing(path, said, size, tokenizer.token_to_id)
    for added in missing:
        token = AddedToken(added.piece, special=added.special, normalized=False)
        (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([token])
    return missing


def _opened(path: Path, content: bytes, settings: dict[str, Any]) -> Any:
    before, after = settings.get("pre_tokenizer") or {}, settings.get("decoder") or {}
    steps = before.get("pretokenizers", [before])
    model = settings["model"]
    # The tokenizers library may panic if one of the settings in CHANGING is used. Therefore such a
    # file is refused before the library reads it.
    if model.get("type", "BPE") == "BPE" and any(map(model.get, CHANGING)):
        raise _loses(path, ": it is " + " with ".join(["BPE", *filter(model.get, CHANGING)]))
    tokenizer = tokenizer_files.json_model(path, content)
    kind = type(tokenizer.model).__name__
    # The normalizer NFC is accepted, although it replaces some characters, because the bytes that
    # change are counted as lost when a text is tokenized.
    normalizer = (settings.get("normalizer") or {"type": "NFC"}).get("type")
    if normalizer != "NFC" or not _keeps_bytes(steps) or after.get("type") != "ByteLevel":
        raise _loses(path)
    if kind != "BPE":
        raise _loses(path, f": it is {kind}")
    for token in tokenizer.get_added_tokens_decoder().values():
        if not token.special and (token.lstrip or token.rstrip):
            raise _loses(path, f": {token.content!r} removes the spaces next to it")
    # The prefix space is disabled, because the library would add it before every chunk of a text.
    if len(steps) == 1:
        tokenizer.pre_tokenizer.add_prefix_space = False
    elif steps[-1].get("add_prefix_space"):
        raise _loses(path, ": it adds a space before a text")
    return tokenizer


def _keeps_bytes(steps: Any) -> bool:
    """Returns True if a pre-tokenizer only cuts the text, and its last step is the byte level."""
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return False
    *splits, last = steps
    return last.get("type") == "ByteLevel" and all(
        step.get("type") == "Digits"
        or (step.get("type") == "Split" and step.get("behavior") != "Removed")
        for step in splits
    )


def _settings(path: Path, content: bytes) -> dict[str, Any]:
    try:
        return untrusted.checked_json(content, _SETTINGS)
    except ValueError as error:
        raise DataError(f"the tokenizer {path} is not a tokenizer.json ({error})") from error


def _loses(path: Path | str, why: str = "") -> DataError:
    return DataError(
        f"the tokenizer {path} does not keep every byte of a text{why}; only byte-level BPE "
        "without a normalizer does, such as RoBERTa's"
    )


def _bytes_of(path: Path | str, piece: str, added: Any) -> bytes:
    """Returns the bytes of the added token `added`, or, if it is None, the bytes of `piece`.

    `piece` is in GPT-2's notation.
    """
    if added:
        return b"" if added.special else added.content.encode()
    try:
        return bytes(map(BYTE_OF_CHARACTER.__getitem__, piece))
    except KeyError as error:
        (strange,) = error.args
        raise _loses(
            path, f": its piece {piece!r} has {strange!r}, which stands for no byte"
        ) from error


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character in GPT-2's notation (Radford et al. 2019, section 2.2)."""
    # Printable bytes are written as themselves; the other bytes are numbered from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


BYTE_OF_CHARACTER = _bytes_of_characters()


def load(name: str) -> Tokenizer:
    """Loads "bytes", or the tokenizer in a sentencepiece .model or a tokenizer.json."""
    return tokenizer_files.load(
        name,
        {
            "bytes": lambda path: ByteTokenizer(),
            ".model": SentencePieceTokenizer,
            ".json": ByteLevelTokenizer,
        },
    )
