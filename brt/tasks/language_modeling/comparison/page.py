"""A page (HTML) with documents whose tokens are coloured by the difference between two models."""

import codecs
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from brt import formatting
from brt.tasks.language_modeling.comparison.terms import CLASSES

_MOST_TOKENS = 5000  # The page shows at most this number of tokens of a document.
_FULL_COLOUR = 4.0  # A difference of this number of bits has the strongest colour.
_NAMES = tuple(CLASSES)
_HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff; }}
pre {{ font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }}
.sample {{ padding: 0 .5em; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>Each token is coloured by its bits in this run minus its bits in {other}.
<span class="sample" style="background:{better}">Blue</span>: this run predicts the token better.
<span class="sample" style="background:{worse}">Orange</span>: {other} does. The strongest colour
stands for {most:g} bits or more. Point at a token to see the bits of both.</p>
"""


class Document(NamedTuple):
    """A document, as two models have read it."""

    name: str
    pieces: Sequence[bytes]  # the bytes of each of the T tokens
    nats: np.ndarray  # float64 [T], nats in the first model
    other: np.ndarray  # float64 [T], nats in the other model
    classes: np.ndarray  # int [T], class of each token; see `terms`


def html(documents: Sequence[Document], *, other: str, without: str | None) -> str:
    """Returns a page that needs no other file.

    The other run has the name `other`, and was read without the part `without` of its memory; None
    stands for no part.
    """
    name = formatting.html(other + (f" without {without}" if without else ""))
    parts = [
        _HEAD.format(
            title=f"Compared with {name}", other=name, better=_colour(-_FULL_COLOUR),
            worse=_colour(_FULL_COLOUR), most=_FULL_COLOUR,
        )
    ]  # fmt: skip
    for document in documents:
        parts.extend(_section(document))
    return "".join([*parts, "</body>\n</html>\n"])


def _section(document: Document) -> Iterator[str]:
    total = len(document.pieces)
    bits = (document.nats - document.other) / math.log(2)
    cut = f", of which the first {_MOST_TOKENS:,} are shown" if total > _MOST_TOKENS else ""
    yield f"<h2>{formatting.html(document.name)}</h2>\n"
    yield f"<p>{total:,} tokens{cut}. Difference: {bits.mean():+.4f} bits per token.</p>\n<pre>"
    for i, piece in enumerate(_characters(document.pieces[:_MOST_TOKENS])):
        ours, theirs = (float(x[i]) / math.log(2) for x in (document.nats, document.other))
        tip = f"{ours:.2f}, other {theirs:.2f} bits; {_NAMES[document.classes[i]]}"
        text = formatting.html(piece)
        yield f'<span style="background:{_colour(ours - theirs)}" title="{tip}">{text}</span>'
    yield "</pre>\n"


def _characters(pieces: Sequence[bytes]) -> Iterator[str]:
    """Yields the text of each token. A character of several tokens belongs to the last of them."""
    return map(codecs.getincrementaldecoder("utf-8")("replace").decode, pieces)


def _colour(bits: float) -> str:
    strength = min(abs(bits) / _FULL_COLOUR, 1.0) * 0.75
    red, green, blue = (30, 110, 230) if bits < 0 else (240, 120, 0)
    return f"rgba({red},{green},{blue},{strength:.2f})"
