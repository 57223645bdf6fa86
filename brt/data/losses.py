"""What a tokenizer does not keep of a text, counted while the text becomes tokens.

The bytes that the tokens stand for are compared with those of the text. Where they differ, bits of
the tokens say nothing about the bytes that are lost: no figure for each of them is reported.
"""

import hashlib

import numpy as np

from brt.data.tokenizers import Tokenizer

_PIECE = 1 << 16  # bytes counted at a time
REMEDY = "use a tokenizer that keeps every byte: 'bytes', or 'train:VOCAB_SIZE'"


class Losses:
    """Compares a document with its tokens, both in parts that need not end together."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._unknown = tokenizer, unknown_id(tokenizer)
        self._digests = hashlib.blake2b(), hashlib.blake2b()
        self._counts = np.zeros((2, 256), np.int64)  # of each byte: in the text, in its tokens
        self.unknown = 0

    def text(self, data: bytes) -> None:
        """The next bytes of the text."""
        self._add(0, data)

    def tokens(self, ids: np.ndarray) -> None:
        """The next of its tokens; an unknown one stands for no byte."""
        known = ids[ids != self._unknown]
        self.unknown += len(ids) - len(known)
        self._add(1, self._tokenizer.decode_bytes(known))

    @property
    def lost(self) -> int:
        """UTF-8 bytes of the text that its tokens do not give back; 0 where they give back all.

        Those that a normalizer replaced by others count, too; of any difference at least one.
        """
        text, tokens = (digest.digest() for digest in self._digests)
        if text == tokens:
            return int(self.unknown > 0)
        difference = self._counts[0] - self._counts[1]
        return max(int(difference.clip(min=0).sum()), int((-difference).clip(min=0).sum()), 1)

    def _add(self, which: int, data: bytes) -> None:
        self._digests[which].update(data)
        values = np.frombuffer(data, np.uint8)
        for start in range(0, len(values), _PIECE):  # bincount takes eight bytes for each of them
            self._counts[which] += np.bincount(values[start : start + _PIECE], minlength=256)


def unknown_id(tokenizer: Tokenizer) -> int:
    """The id that stands for what a tokenizer cannot spell; -1: it spells everything."""
    return getattr(tokenizer, "unk_id", -1)


def of_text(tokenizer: Tokenizer, text: str) -> int:
    """Bytes of a text that its tokens do not give back."""
    found = Losses(tokenizer)
    found.text(text.encode())
    found.tokens(tokenizer.encode(text))
    return found.lost


def recounted(tokenizer: Tokenizer, ids: np.ndarray, size: int) -> int:
    """The same, as far as tokens and a number of bytes tell, of a text that is not there any more.

    Args:
      ids: of the text.
      size: bytes of the text.
    """
    known = ids[ids != unknown_id(tokenizer)]
    lost = abs(size - len(tokenizer.decode_bytes(known)))
    return max(lost, int(len(known) < len(ids)))


def described(lost: int, size: int, unknown: int) -> str:
    """A clause about what was lost; "" where nothing was."""
    if not lost:
        return ""
    pieces = f" ({unknown:,} unknown tokens)" if unknown else ""
    return (
        f"the tokenizer loses {lost:,} of {size:,} bytes{pieces}, so that there are no bits per "
        f"byte, character or word; {REMEDY}"
    )
