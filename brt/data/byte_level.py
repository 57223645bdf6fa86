"""Byte-level BPE from a tokenizer.json, as used by GPT-2 and RoBERTa.

Such a tokenizer represents every byte of a text, so that decoding returns the text exactly. Files
whose settings would change texts are refused; only the normalizer NFC is accepted.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from brt import untrusted
from brt.data import originals, special_tokens, tokenizer_files
from brt.data.chunks import ChunkTokenizer, end_of_word
from brt.data.special_tokens import Added
from brt.errors import DataError

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


class ByteLevelTokenizer(ChunkTokenizer):
    """A byte-level BPE tokenizer, which adds no special ids to a text; see `tokenizers.Tokenizer`.

    If the last id of the file is the mask token, `vocab_size` does not include this id: no text is
    encoded with the id, and a masked language model uses it to mask tokens. A tokenizer.json that
    is damaged, has no piece for BOS, or does not keep every byte of a text raises DataError.
    """

    _chunk_end = staticmethod(end_of_word)

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.name = self.path.name
        content = tokenizer_files.read(self.path)
        self.file, self.beside = ("tokenizer.json", content), originals.read(self.path)
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
        self.bos_id, self.notes = special_tokens.beginning(said, self._id_of, default)
        if self.bos_id < 0:
            raise DataError(
                f"the tokenizer {path} has none of the pieces {', '.join(special_tokens.START)}; "
                "name its bos_token in a tokenizer_config.json beside it"
            )
        identity = special_tokens.identity(content, self.bos_id, default, added)
        self.fingerprint = hashlib.sha256(identity).hexdigest()
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
        """Returns the id of a piece, or an id of a special token; None for others."""
        named = isinstance(token, str)
        i: Any = self._tokenizer.token_to_id(token) if named else token
        if i is None or not 0 <= i < self.vocab_size:
            return None
        known = named or self._tokenizer.id_to_token(i) in special_tokens.START
        return i if known or not self._bytes[i] else None

    def _check_bytes(self, texts: list[str]) -> None:
        """Refuses texts with bytes that no piece stands for: they would be dropped silently."""
        for text in texts:
            data = text.encode()
            if len(data.translate(None, self._missing)) < len(data):
                byte = next(byte for byte in data if byte in self._missing)
                raise DataError(
                    f"the tokenizer {self.path} has no piece for the byte 0x{byte:02x}, which a "
                    "text has; remove this character from the text"
                )


def _add_missing(path: Path, tokenizer: Any, said: special_tokens.Statements) -> list[Added]:
    """Adds those tokens to a tokenizer that other files give it, and returns them."""
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
    """Decodes a piece in GPT-2's notation (Radford et al. 2019, section 2.2) or an added token."""
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
    """Returns the byte that each character of GPT-2's notation stands for."""
    # Printable bytes are written as themselves; the other bytes are numbered from U+0100 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    return dict(zip(characters, [*printable, *others], strict=True))


BYTE_OF_CHARACTER = _bytes_of_characters()
