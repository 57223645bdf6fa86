"""Batches of windows. The targets of a batch are the positions of the answers' starts and ends."""

from brt.data.texts.batches import TextReader as QuestionReader

__all__ = ["QuestionReader"]
