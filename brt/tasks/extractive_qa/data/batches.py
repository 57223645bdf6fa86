"""The reader of batches of windows, whose targets are the first and last token of the answer."""

from brt.data.texts.batches import TextReader as QuestionReader

__all__ = ["QuestionReader"]
