"""Generated texts with labels for tests and examples, the same on every machine.

A text consists of 30 to 60 words from a fixed lexicon of 60 words and, at a random position, one
keyword. There are three labels with six keywords each, and the keyword alone determines the label.
The classifier reads the encoder's output at the first token, so attention has to find the keyword.
"""

from collections.abc import Iterator

from brt.data import generated
from brt.tasks.text_classification.data.examples import Example

# The hash of a generated source depends on this number. The number must be increased if the
# generated text changes, so that data in the cache are prepared again.
VERSION = 1
FILLERS, LABELS, WORDS = 60, ("animal", "plant", "stone"), 6


def examples(source: str) -> Iterator[Example]:
    """Yields the texts of a source `generated:NAME/COUNT`; NAME determines all of them."""
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
