"""Sorts the tokens of a document into classes: by what they are part of, and by where this occurred
before.

A *term* is a word, an identifier or a LaTeX command. Its class says what a memory could be good
for: a name that occurred before, but not within the window, is what only a memory can recall.
"""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

_TERM = re.compile(rb"\\[A-Za-z]+|[A-Za-z_\x80-\xff][A-Za-z0-9_\x80-\xff]*")
_NAME = re.compile(rb"[\\_0-9]|.[A-Z]")
_ARTICLES = {b"a", b"A", b"I", b"O"}  # Words of one letter.

# The names of the classes, with descriptions for people.
CLASSES = {
    "name, beyond the window": "names that occurred before, but not within the window",
    "name, within the window": "names that occurred within the window",
    "name, new": "names that occur for the first time in the document",
    "word, beyond the window": "words that occurred before, but not within the window",
    "word, within the window": "words that occurred within the window",
    "word, new": "words that occur for the first time in the document",
    "other": "white space, punctuation and numbers",
}
_BEYOND, _WITHIN, _NEW, _PLACES = 0, 1, 2, 3
_OTHER = len(CLASSES) - 1


def token_classes(pieces: Sequence[bytes], window: int) -> Int[np.ndarray, " T"]:
    """Returns the class of each token of a document, as an index into `CLASSES`.

    A token has the class of the first term of which it contains a part. A term is a name if it has
    a digit, an underscore, a backslash or a capital letter behind its first character, if it is a
    single letter other than the words "a", "I" and "O", or if it begins with a capital letter and
    the document never has it with a small letter.

    A term occurred within the window if the last token of its previous occurrence is at most
    `window` tokens before its own first token, and beyond the window if it occurred only earlier.
    """
    text = b"".join(pieces)
    ends = np.cumsum([len(piece) for piece in pieces])
    spans = [match.span() for match in _TERM.finditer(text)]
    terms = [text[start:stop] for start, stop in spans]
    known = set(terms)
    last: dict[bytes, int] = {}
    classes = np.full(len(pieces), _OTHER)
    for term, (start, stop) in zip(terms, spans, strict=True):
        first, final = (int(np.searchsorted(ends, b, "right")) for b in (start, stop - 1))
        before = last.get(term)
        place = _NEW if before is None else _WITHIN if first - before <= window else _BEYOND
        last[term] = final
        of_term = classes[first : final + 1]
        of_term[of_term == _OTHER] = place + (0 if _is_name(term, known) else _PLACES)
    return classes


def _is_name(term: bytes, known: set[bytes]) -> bool:
    if len(term) == 1:
        return term not in _ARTICLES
    if _NAME.search(term):
        return True
    return term[:1].isupper() and term.lower() not in known
