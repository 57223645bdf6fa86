"""The reader of batches of rows, which are sentences or pairs of sentences.

The target of a row is a label or a number.
"""

from brt.data.texts.batches import TextReader as SentenceReader

__all__ = ["SentenceReader"]
