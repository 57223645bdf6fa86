"""Generated questions for tests and examples, which are the same on every machine.

A context consists of five to eight facts such as "banana is gofuna rilo .", separated by random
words of a fixed lexicon. In this fact, "banana" is the key and "gofuna rilo" the value, one or two
words long. A question is "what is banana ?", and its answer is the value of the key. The other
facts have other keys, so a model has to find the key of the question.
"""

from collections.abc import Iterator

from brt.data import generated
from brt.tasks.extractive_qa.data.squad import Answer, Question

# The hash of a generated source depends on this number. The number must be increased if the
# generated text changes, so that data in the cache are prepared again.
VERSION = 1
KEYS, VALUES, FILLERS = 24, 36, 36


def questions(source: str) -> Iterator[Question]:
    """Yields the questions of a source `generated:NAME/COUNT`; NAME determines all of them."""
    name, count = generated.parse(source)
    lexicon = generated.words(f"questions {VERSION}", KEYS + VALUES + FILLERS)
    keys, values, fillers = lexicon[:KEYS], lexicon[KEYS:-FILLERS], lexicon[-FILLERS:]
    for number in range(count):
        draw = generated.draw(f"questions {VERSION} {name}/{number}")
        chosen = draw.choice(KEYS, draw.randint(5, 9), replace=False)
        asked, context, answer = draw.randint(len(chosen)), "", Answer("", 0)
        for index, key in enumerate(chosen):
            for word in draw.randint(FILLERS, size=draw.randint(2, 7)):
                context += f"{fillers[word]} "
            context += f"{keys[key]} is "
            value = " ".join(values[i] for i in draw.randint(VALUES, size=draw.randint(1, 3)))
            if index == asked:
                answer = Answer(value, len(context))
            context += f"{value} . "
        id = f"{name}-{number:05}"
        text = f"what is {keys[chosen[asked]]} ?"
        yield Question(id, id, context.strip(), text, (answer,))
