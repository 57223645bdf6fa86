"""Counts the bytes of a text that are lost when the text is tokenized.

A tokenizer may drop or normalise characters. To detect this, the bytes to which the tokens decode
are compared with the bytes of the text. If they differ, bits per byte would be wrong, so brt does
not report them.
"""

import numpy as np

from brt.data.tokenizers import Tokenizer

REMEDY = "use a tokenizer that keeps every byte: 'bytes', or 'train:VOCAB_SIZE'"


class LostBytes:
    """Compares the bytes of a document with the bytes to which the document's tokens decode."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._unknown = tokenizer, tokenizer.unk_id
        self._differs = False
        # For each value of a byte, this array has the number of its occurrences in the text, minus
        # the number in the decoded tokens. Chunks that are decoded exactly contribute nothing.
        self._counts = np.zeros(256, np.int64)
        self.unknown = 0  # the number of unknown tokens so far

    def add(self, data: bytes, ids: np.ndarray) -> None:
        """Takes the next chunk in UTF-8, and its tokens; unknown tokens count as no bytes."""
        known = ids
        if self._unknown >= 0:
            known = ids[ids != self._unknown]
            self.unknown += len(ids) - len(known)
        decoded = self._tokenizer.decode_bytes(known)
        if decoded != data:
            self._differs = True
            self._counts += _counts(data) - _counts(decoded)

    @property
    def lost(self) -> int:
        """Number of UTF-8 bytes of the text that the tokens do not reproduce."""
        # Bytes that a normalizer replaced count as lost. Any difference counts as at least one
        # byte.
        if not self._differs:
            return int(self.unknown > 0)
        too_few, too_many = self._counts.clip(min=0).sum(), (-self._counts).clip(min=0).sum()
        return max(int(too_few), int(too_many), 1)


def _counts(data: bytes) -> np.ndarray:
    return np.bincount(np.frombuffer(data, np.uint8), minlength=256)


def count(tokenizer: Tokenizer, text: str) -> int:
    """Tokenizes a text, and returns the number of its bytes that the tokens do not reproduce."""
    counter = LostBytes(tokenizer)
    counter.add(text.encode(), tokenizer.encode(text))
    return counter.lost


def loss_message(lost: int, size: int, unknown: int) -> str:
    """Returns a clause which says that `lost` of `size` bytes are lost; "" if `lost` is 0.

    `unknown` is the number of unknown tokens, which the clause names, too.
    """
    if not lost:
        return ""
    pieces = f" ({unknown:,} unknown tokens)" if unknown else ""
    return (
        f"the tokenizer loses {lost:,} of {size:,} bytes{pieces}, so that there are no bits per "
        f"byte, character or word; {REMEDY}"
    )
