"""Batches of sentences. The target of each row is one label or one number."""

from brt.data.texts.batches import TextReader as SentenceReader

__all__ = ["SentenceReader"]
