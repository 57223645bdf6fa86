"""Generates the documents of memory tasks, and finds the answers in them.

A document states facts, continues with filler, and asks for the facts. Answers are marked inside of
the text as `>answer<`. Documents are therefore ordinary text, and token stores, lanes, models and
generation need no special support for them. For evaluation, `answers` derives the correct answers
from the text of a document alone.
"""

import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from numpy.random import RandomState

from brt.data import generated, sources
from brt.data.memory.names import Memory, belongs_to, parse
from brt.errors import DataError

T = TypeVar("T")
# An event is a position in the filler (the text that separates facts from questions), and the text
# that is inserted there.
Events = list[tuple[int, str]]
# A value of this type maps a person to the place where the person is, or a thing to its owner. The
# position after the sentence that says so is stored together with the place or owner.
LastStated = dict[bytes, tuple[bytes, int]]

_DIGITS = "0123456789abcdef"
_KEYS = {"copy": [""], "recall": list(string.ascii_letters), "needle": generated.words("keys", 52)}
_PEOPLE = [name.capitalize() for name in generated.words("people", 8)]
_THINGS = "bell book coin knife lamp letter map ring".split()
_PLACES = "attic cellar chapel garden harbour kitchen library stable".split()
# Facts are drawn at random until one belongs to the split. A drawn fact belongs to a given split
# with a probability of at least 1/8. If none of this many facts belongs to the split, there are too
# few different facts, and an error is raised.
_DRAWS = 1000
# These characters are removed from filler: < = > because they mark facts, control characters except
# newlines, and all characters beyond ASCII because they take several bytes.
_NOT_FILLER = re.compile(r"[^\n -;?-~]")

_FACT = re.compile(rb"(\w*)=(\w+);|(\w*)>(\w+)<")
_SENTENCE = re.compile(
    rf"({'|'.join(_PEOPLE)}) (goes to|takes) the (\w+)\.|the (\w+)\? >(\w+)<".encode()
)
_EVENT = re.compile(rb"\*|#>(\d)<")


class Answer(NamedTuple):
    """An answer in a document; positions count bytes from the start of the document."""

    start: int  # the position of the answer's first byte
    stop: int  # the position after the answer's last byte
    # The position after the fact that determines the answer, or after the first of several facts.
    stated: int
    text: bytes  # the correct answer


def documents(source: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every document of a source; see `brt.data.memory.names`."""
    # The name of the source, and the novels that the filler is taken from, determine every byte.
    memory = parse(source)
    novels = "\n".join(file.path.read_text("utf-8") for file in sources.files(source))
    novels = _NOT_FILLER.sub("", novels)
    if novels and memory.size > len(novels):
        raise DataError(
            f"{source}: size={memory.size} is more than the {len(novels)} bytes of the novels of "
            f"{memory.split}; lower it"
        )
    random = generated.draw(" ".join(map(str, memory._replace(documents=0))))
    for number in range(memory.documents):
        start = random.randint(len(novels) - memory.size + 1) if novels else 0
        filler = novels[start : start + memory.size] or "." * memory.size
        distance = memory.distance[number % len(memory.distance)]
        events = _KINDS[memory.task].tell(memory, random, distance)
        yield f"{source}#{number}", _laid(filler, events)


def answers(name: str, text: bytes) -> Iterator[Answer]:
    """Yields the correct answers to the questions in a document, in the order of the text.

    `name` is the name that `documents` gave the document, and `text` its text in UTF-8.
    """
    memory = parse(name)
    return _KINDS[memory.task].solve(memory, text)


def _laid(filler: str, events: Events) -> str:
    """Inserts events into the filler; in the text of a novel, each before the next space."""
    parts, last = [], 0
    for place, event in sorted(events, key=lambda event: event[0]):
        border = filler.find(" ", place)
        place = max(last, place if border < 0 else border)
        parts += [filler[last:place], event]
        last = place
    return "".join([*parts, filler[last:]])


def _tell_facts(memory: Memory, random: RandomState, distance: int) -> Events:
    """Returns events that state values of keys, and events that ask for the values."""
    keys, scattered = _KEYS[memory.task], memory.task == "needle"
    before = " " if scattered else ""
    places = random.randint(memory.size - distance + 1, size=memory.facts if scattered else 1)
    statements, questions = [], []
    for number, key in enumerate(random.permutation(memory.symbols)[: memory.facts]):
        place, name, value = int(places[number % len(places)]), keys[key], _value(memory, random)
        statements.append((place, f"{before}{name}={value};"))
        # `distance` counts the bytes between the value of a fact and the answer, including the `;`
        # after the value and the key of the question, so the filler has `label_size` bytes less.
        label_size = len(f";{before}{name}>")
        questions.append((place + max(distance - label_size, 0), f"{before}{name}>{value}<"))
    if scattered:
        return statements + questions
    return statements + [questions[i] for i in random.permutation(memory.facts)[: memory.queries]]


def _value(memory: Memory, random: RandomState) -> str:
    return _owned(
        memory, lambda: "".join(_DIGITS[i] for i in random.randint(16, size=memory.length))
    )


def _owned(memory: Memory, draw: Callable[[], T]) -> T:
    """Returns the first draw that belongs to the split."""
    for _ in range(_DRAWS):
        if belongs_to(str(drawn := draw()), memory.split):
            return drawn
    raise DataError(
        f"memory:{memory.task}/{memory.split} with facts={memory.facts}, "
        f"symbols={memory.symbols} and size={memory.size} has no documents that no other split "
        "has; raise them"
    )


def _solve_facts(memory: Memory, text: bytes) -> Iterator[Answer]:
    facts = {}
    for match in _FACT.finditer(text):
        key, value, question, _ = match.groups()
        if value:
            facts[key] = match.end(2), value
        else:
            yield Answer(*match.span(4), *facts[question])


def _tell_moves(memory: Memory, random: RandomState, distance: int) -> Events:
    """Returns events that state who went where or took what, and events that ask for things."""
    sentences = _owned(
        memory, lambda: [_sentence(i, memory.symbols, random) for i in range(memory.facts)]
    )
    places = sorted(random.randint(memory.size - distance + 1, size=memory.facts))
    things = [_THINGS[i] for i in random.permutation(memory.symbols)[: memory.queries]]
    place_of, owner_of = _final_state("".join(sentences).encode())
    where = {thing: place_of[owner_of[thing.encode()][0]][0].decode() for thing in things}
    questions = [(memory.size, f" Where is the {thing}? >{where[thing]}<") for thing in things]
    return list(zip(map(int, places), sentences, strict=True)) + questions


def _sentence(number: int, symbols: int, random: RandomState) -> str:
    """Returns the sentence with the index `number`, about a person that goes or takes a thing."""
    # In the first sentences every person goes to some place, and in the next sentences every thing
    # is taken, so that every thing has a place. Further sentences are random.
    who, thing, place, goes = (int(i) for i in random.randint((symbols,) * 3 + (2,)))
    if number < symbols:
        who, goes = number, 1
    elif number < 2 * symbols:
        thing, goes = number - symbols, 0
    what = f"goes to the {_PLACES[place]}" if goes else f"takes the {_THINGS[thing]}"
    return f" {_PEOPLE[who]} {what}."


def _final_state(text: bytes) -> tuple[LastStated, LastStated]:
    """Returns the last stated place of each person, and the last stated owner of each thing."""
    place_of: LastStated = {}
    owner_of: LastStated = {}
    for match in _SENTENCE.finditer(text):
        who, verb, what, *_ = match.groups()
        if verb == b"goes to":
            place_of[who] = what, match.end()
        elif verb:
            owner_of[what] = who, match.end()
    return place_of, owner_of


def _solve_moves(memory: Memory, text: bytes) -> Iterator[Answer]:
    # The final state answers every question, because after the first question no sentence moves a
    # person or a thing.
    place_of, owner_of = _final_state(text)
    for match in _SENTENCE.finditer(text):
        if thing := match[4]:
            who, taken = owner_of[thing]
            place, gone = place_of[who]
            yield Answer(*match.span(5), min(taken, gone), place)


def _tell_events(memory: Memory, random: RandomState, distance: int) -> Events:
    """Returns events that are stars, and an event that asks for the number of stars."""

    def draw() -> list[int]:
        count = random.randint(memory.facts + 1)
        return sorted(map(int, random.randint(memory.size - distance + 1, size=count)))

    places = _owned(memory, draw)
    question = f"#>{len(places) % memory.symbols}<"
    return [(place, "*") for place in places] + [(memory.size, question)]


def _solve_events(memory: Memory, text: bytes) -> Iterator[Answer]:
    events = []
    for match in _EVENT.finditer(text):
        if match[1] is None:
            events.append(match.end())
        else:
            first = events[0] if events else 0
            yield Answer(*match.span(1), first, b"%d" % (len(events) % memory.symbols))


class _Kind(NamedTuple):
    tell: Callable[[Memory, RandomState, int], Events]
    solve: Callable[[Memory, bytes], Iterator[Answer]]


_FACTS = _Kind(_tell_facts, _solve_facts)
_KINDS = {
    "copy": _FACTS,
    "recall": _FACTS,
    "needle": _FACTS,
    "tracking": _Kind(_tell_moves, _solve_moves),
    "counting": _Kind(_tell_events, _solve_events),
}
