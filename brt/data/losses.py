"""Counts the bytes of a text that are lost when the text is tokenized.

A tokenizer may drop or normalise characters. To detect this, the bytes to which the tokens decode
are compared with the bytes of the text. If they differ, bits per byte would be wrong, and brt does
not report bits per byte.
"""

import hashlib

import numpy as np

from brt.data.tokenizers import Tokenizer

_PIECE = 1 << 16  # This number of bytes is counted at a time.
REMEDY = "use a tokenizer that keeps every byte: 'bytes', or 'train:VOCAB_SIZE'"


class Losses:
    """Compares the bytes of a document with the bytes to which the document's tokens decode.

    The caller passes the text to the method `text` and the tokens to the method `tokens`, both in
    parts of any length.

    Args:
      tokenizer: the tokenizer of the document.

    Attributes:
      unknown: number of unknown tokens so far.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._unknown = tokenizer, unknown_id(tokenizer)
        self._digests = hashlib.blake2b(), hashlib.blake2b()
        # Row 0 counts how often each byte occurs in the text, and row 1 how often it occurs in the
        # decoded tokens.
        self._counts = np.zeros((2, 256), np.int64)
        self.unknown = 0

    def text(self, data: bytes) -> None:
        """Takes the next part of the document's text, as UTF-8 bytes."""
        self._add(0, data)

    def tokens(self, ids: np.ndarray) -> None:
        """Takes the next tokens of the document, int [T]; unknown tokens decode to no bytes."""
        known = ids[ids != self._unknown]
        self.unknown += len(ids) - len(known)
        self._add(1, self._tokenizer.decode_bytes(known))

    @property
    def lost(self) -> int:
        """Number of UTF-8 bytes of the text that the tokens do not reproduce.

        Bytes that a normalizer replaced count as lost. Any difference counts as at least one byte.
        """
        text, tokens = (digest.digest() for digest in self._digests)
        if text == tokens:
            return int(self.unknown > 0)
        difference = self._counts[0] - self._counts[1]
        return max(int(difference.clip(min=0).sum()), int((-difference).clip(min=0).sum()), 1)

    def _add(self, which: int, data: bytes) -> None:
        self._digests[which].update(data)
        values = np.frombuffer(data, np.uint8)
        # np.bincount converts its input to int64, so bytes are counted in pieces to save memory.
        for start in range(0, len(values), _PIECE):
            self._counts[which] += np.bincount(values[start : start + _PIECE], minlength=256)


def unknown_id(tokenizer: Tokenizer) -> int:
    """Returns the id of the unknown token; -1 if the tokenizer can represent every text."""
    return getattr(tokenizer, "unk_id", -1)


def lost_bytes(tokenizer: Tokenizer, text: str) -> int:
    """Tokenizes a text, and returns the number of its bytes that the tokens do not reproduce."""
    counter = Losses(tokenizer)
    counter.text(text.encode())
    counter.tokens(tokenizer.encode(text))
    return counter.lost


def estimated_loss(tokenizer: Tokenizer, ids: np.ndarray, size: int) -> int:
    """Estimates the number of bytes of a text that the text's tokens do not reproduce.

    The estimate is used if only the tokens and the size of the text are known.

    Args:
      tokenizer: the tokenizer that made the tokens.
      ids: the text's tokens.
      size: the text's size in bytes.
    """
    known = ids[ids != unknown_id(tokenizer)]
    lost = abs(size - len(tokenizer.decode_bytes(known)))
    return max(lost, int(len(known) < len(ids)))


def loss_message(lost: int, size: int, unknown: int) -> str:
    """Returns a clause of a message about the number of bytes that a tokenizer loses; "" for none.

    Args:
      lost: the number of lost bytes.
      size: the number of bytes of the text.
      unknown: the number of unknown tokens.
    """
    if not lost:
        return ""
    pieces = f" ({unknown:,} unknown tokens)" if unknown else ""
    return (
        f"the tokenizer loses {lost:,} of {size:,} bytes{pieces}, so that there are no bits per "
        f"byte, character or word; {REMEDY}"
    )
