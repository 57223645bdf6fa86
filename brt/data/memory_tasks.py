"""Memory tasks: sources `memory:TASK/SPLIT/COUNT?SETTING=VALUE&SETTING=VALUE` and their documents.

A source consists of COUNT generated documents, which state facts, continue with filler, and ask for
the facts. Answers are marked inside of the text as `>answer<`. Documents are therefore ordinary
text, and token stores, lanes, models and generation need no special support for them. For
evaluation, `answers` derives the correct answers from the text of a document alone.

    task      content and question of a document                               filler
    copy      states one value, and asks for it                                dots
    recall    states the values of keys side by side, and asks for some        dots
    needle    states the values of keys at random places, and asks for all     a novel's text
    tracking  says who goes where and who takes which thing, and asks for the  a novel's text
              places of things, which are the last places of their owners
    counting  contains events, and asks for their number, modulo `symbols`     dots

    setting   meaning
    distance  number of bytes between a fact and the answer; for a list such as 32,64,128, the
              documents of the source use the values in turn
    size      number of bytes of filler in a document; facts are in the first size - distance bytes;
              0 stands for the largest distance, with which all facts are at the start
    facts     number of values or sentences in a document; for counting, the largest number of
              events
    queries   number of facts that are asked for; needle asks for all facts
    symbols   number of different keys; for tracking, the number of people, of things and of places;
              for counting, the modulus
    length    number of hexadecimal digits of a value
    seed      determines every byte, together with the other settings, the split and the number of
              the document

No fact of a test document occurs in a training document, because hashes assign facts to splits. For
copy, recall and needle, a fact is a value; for tracking and counting, it is the list of all
sentences or events of a document.
"""

import hashlib
import re
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from numpy.random import RandomState

from brt.config.fields import MEMORY
from brt.data import generated
from brt.errors import DataError

# A fact belongs to the split whose range contains the fact's hash, modulo 8.
SHARES = {"train": range(2, 8), "validation": range(1), "test": range(1, 2)}
_USUAL: dict[str, dict[str, int]] = {
    "copy": {"distance": 96, "length": 8},
    "recall": {"distance": 96, "facts": 4, "queries": 4, "symbols": 26, "length": 4},
    "needle": {"distance": 1024, "size": 4096, "facts": 3, "symbols": 26, "length": 6},
    "tracking": {"distance": 256, "size": 768, "facts": 8, "queries": 2, "symbols": 3},
    "counting": {"distance": 128, "size": 384, "facts": 19, "symbols": 10},
}
_SYMBOLS = {"recall": (1, 52), "needle": (1, 52), "tracking": (2, 8), "counting": (2, 10)}
# A value has at least this number of hexadecimal digits. With three digits there are 4,096 values,
# of which validation and test get about 512 each. Fewer digits would give too few values.
_SHORTEST = 3


class Memory(NamedTuple):
    """The settings of a memory task, read from the name of a source; see the module docstring."""

    task: str
    split: str
    documents: int  # the COUNT in the name
    distance: tuple[int, ...]  # the values that documents use in turn
    size: int
    facts: int = 1
    queries: int = 1
    symbols: int = 1
    length: int = _SHORTEST
    seed: int = 0

    @property
    def novels(self) -> str:
        """Name of the source of novels that the filler is taken from; "" if the filler is dots."""
        return f"corpus:novels/{self.split}" if self.task in ("needle", "tracking") else ""


def parse(source: str) -> Memory:
    """Returns the settings in the name of a source; missing settings have the task's defaults.

    `source` may also be the name of a document, which is the name of a source with `#NUMBER`.
    """
    name = source.partition("#")[0]
    match = re.fullmatch(rf"{MEMORY}(\w+)/(\w+)/([1-9]\d*)(?:\?(.*))?", name)
    if not match or match[1] not in _USUAL or match[2] not in SHARES:
        raise DataError(
            f"{name} must be {MEMORY}TASK/SPLIT/COUNT, such as {MEMORY}copy/train/1000?distance=96;"
            f" tasks are {', '.join(_USUAL)}, splits {', '.join(SHARES)}"
        )
    values: dict[str, tuple[int, ...]] = {
        setting: (value,) for setting, value in (_USUAL[match[1]] | {"seed": 0}).items()
    }
    values.setdefault("size", (0,))
    for pair in filter(None, (match[4] or "").split("&")):
        setting, _, value = pair.partition("=")
        several = r"\d+(,\d+)*" if setting == "distance" else r"\d+"
        if setting not in values or not re.fullmatch(several, value):
            raise DataError(
                f"{name}: {pair} must be SETTING=NUMBER; {match[1]} has {', '.join(values)}"
            )
        values[setting] = tuple(map(int, value.split(",")))
    distance, longest = values.pop("distance"), max(values["size"])
    single = {setting: value for setting, (value,) in values.items()}
    single["size"] = longest or max(distance)
    memory = Memory(match[1], match[2], int(match[3]), distance, **single)
    if wrong := _wrong(memory):
        raise DataError(f"{name}: {wrong}")
    return memory


def _wrong(memory: Memory) -> str:
    """Returns a phrase about settings that contradict each other; "" for valid settings."""
    task, facts, symbols, farthest = memory.task, memory.facts, memory.symbols, max(memory.distance)
    low, high = _SYMBOLS.get(task, (1, 1))
    most, limit = (symbols, "symbols") if task == "tracking" else (facts, "facts")
    if farthest > memory.size:
        return (
            f"distance={farthest} lies beyond its size={memory.size} bytes of filler; raise size, "
            "or lower distance"
        )
    if not low <= symbols <= high:
        return f"symbols={symbols} must be from {low} to {high}"
    if facts < 1:
        return f"facts={facts} must be above 0"
    if task in ("recall", "needle") and facts > symbols:
        return f"facts={facts} is more than symbols={symbols}, the keys that tell them apart"
    if task == "tracking" and facts < 2 * symbols:
        return (
            f"facts={facts} must be at least {2 * symbols}, a sentence for each of the people and "
            f"things, symbols={symbols} each"
        )
    if not 1 <= memory.queries <= most:
        return f"queries={memory.queries} must be from 1 to {limit}={most}"
    if memory.length < _SHORTEST:
        return (
            f"length={memory.length} must be at least {_SHORTEST}, so that train and test share "
            "no value"
        )
    return ""


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


Tell = Callable[[Memory, RandomState, int], Events]
Solve = Callable[[Memory, bytes], Iterator[Answer]]


def documents(source: str, novels: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every document of a source.

    The filler is taken from `novels`, the text of the source `Memory.novels`. This text and the
    name `source` determine every byte of the documents.
    """
    memory = parse(source)
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
        tell, _ = _KINDS[memory.task]
        events = tell(memory, random, distance)
        yield f"{source}#{number}", _laid(filler, events)


def answers(name: str, text: bytes) -> Iterator[Answer]:
    """Yields the correct answers to the questions in a document, in the order of the text.

    `name` is the name that `documents` gave the document, and `text` its text in UTF-8.
    """
    memory = parse(name)
    _, solve = _KINDS[memory.task]
    return solve(memory, text)


def _laid(filler: str, events: Events) -> str:
    """Returns the filler, with the text of each event inserted at the event's position.

    In a novel, the text is inserted before the next space after the position.
    """
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
        # `distance` counts the bytes between the value of a fact and the answer: the `;` after the
        # value, filler, and the question up to `>`. `label_size` is the number of these bytes that
        # are not filler.
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
    """Returns the first result of `draw` whose hash belongs to the split of `memory`."""
    for _ in range(_DRAWS):
        drawn = draw()
        if hashlib.sha256(str(drawn).encode()).digest()[0] % 8 in SHARES[memory.split]:
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
    """Returns events that say who goes where or takes what, and events that ask for places."""
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
    """Returns the sentence with the index `number`: a person goes to a place or takes a thing."""
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
    """Returns events that insert stars, and one that asks for their number modulo `symbols`."""

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


# For each task: the function that writes facts and questions, and the one that finds the answers.
_KINDS: dict[str, tuple[Tell, Solve]] = {
    **dict.fromkeys(("copy", "recall", "needle"), (_tell_facts, _solve_facts)),
    "tracking": (_tell_moves, _solve_moves),
    "counting": (_tell_events, _solve_events),
}
