"""The reader of batches of sentences, whose targets are one label or one number for each row."""

from brt.data.texts.batches import TextReader as SentenceReader

__all__ = ["SentenceReader"]
