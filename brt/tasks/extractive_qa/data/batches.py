"""Batches of windows; `targets` of a batch is where the answer starts and ends."""

from brt.data.texts.batches import TextReader as QuestionReader

__all__ = ["QuestionReader"]
