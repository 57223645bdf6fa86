"""The reader of batches of windows (parts of a text, each with a question about the text).

The targets of a window are the positions of the answer's first and last token.
"""

from brt.data.texts.batches import TextReader as QuestionReader

__all__ = ["QuestionReader"]
