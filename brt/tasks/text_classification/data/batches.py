"""Batches of sentences; `targets` of a batch is one label or number."""

from brt.data.texts.batches import TextReader as SentenceReader

__all__ = ["SentenceReader"]
