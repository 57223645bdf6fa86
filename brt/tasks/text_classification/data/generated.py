"""Texts that are made up: enough to learn from, and the same on every machine.

A text is 30 to 60 words of a fixed lexicon of 60 and, anywhere among them, one word of 18 others,
six for each of three labels: that word alone decides. A classifier reads a text at its first
token, so attention has to find the word wherever it is.
"""

from collections.abc import Iterator

from brt.data import generated
from brt.tasks.text_classification.data.examples import Example

VERSION = 1  # other texts are another version
FILLERS, LABELS, WORDS = 60, ("animal", "plant", "stone"), 6


def examples(source: str) -> Iterator[Example]:
    """The texts; a name always gives the same, and another name others."""
    name, count = generated.parse(source)
    lexicon = generated.words(f"sentences {VERSION}", FILLERS + len(LABELS) * WORDS)
    for number in range(count):
        draw = generated.draw(f"sentences {VERSION} {name}/{number}")
        text = [lexicon[i] for i in draw.randint(FILLERS, size=draw.randint(30, 61))]
        label = draw.randint(len(LABELS))
        word = lexicon[FILLERS + label * WORDS + draw.randint(WORDS)]
        text.insert(draw.randint(len(text) + 1), word)
        id = f"{name}-{number:05}"
        yield Example(id, id, (" ".join(text),), LABELS[label])
