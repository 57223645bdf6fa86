"""Questions that are made up: enough to learn from, and the same on every machine.

A context is five to eight facts, as "banana is gofuna rilo .", with words of a fixed lexicon
between them; a question is "what is banana ?". The answer is the key's value, one or two words
long. Other facts hold other keys, so where the question's key stands decides.
"""

from collections.abc import Iterator

from brt.data import generated
from brt.tasks.extractive_qa.data.squad import Answer, Question

VERSION = 1  # other texts are another version
KEYS, VALUES, FILLERS = 24, 36, 36


def questions(source: str) -> Iterator[Question]:
    """The questions; a name always gives the same, and another name others."""
    name, count = generated.parse(source)
    lexicon = generated.words(f"questions {VERSION}", KEYS + VALUES + FILLERS)
    keys, values, fillers = lexicon[:KEYS], lexicon[KEYS:-FILLERS], lexicon[-FILLERS:]
    for number in range(count):
        draw = generated.draw(f"questions {VERSION} {name}/{number}")
        chosen = draw.choice(KEYS, draw.randint(5, 9), replace=False)
        asked, context, answer = draw.randint(len(chosen)), "", Answer("", 0)
        for place, key in enumerate(chosen):
            for word in draw.randint(FILLERS, size=draw.randint(2, 7)):
                context += f"{fillers[word]} "
            context += f"{keys[key]} is "
            value = " ".join(values[i] for i in draw.randint(VALUES, size=draw.randint(1, 3)))
            if place == asked:
                answer = Answer(value, len(context))
            context += f"{value} . "
        id = f"{name}-{number:05}"
        text = f"what is {keys[chosen[asked]]} ?"
        yield Question(id, id, context.strip(), text, (answer,))
