"""Names of the sources of memory tasks: `memory:TASK/SPLIT/COUNT?SETTING=VALUE&SETTING=VALUE`.

A source consists of COUNT generated documents, which state facts and later ask for the facts. The
filler is the text between facts and questions.

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
              0 stands for the distance, so that all facts are at the start
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
from typing import NamedTuple

from brt.config.fields import MEMORY
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
# of which validation and test get an eighth each, about 512. Fewer digits would be too few values.
_SHORTEST = 3


class Memory(NamedTuple):
    """The settings in the name of a source of a memory task; see the module docstring."""

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
    """Returns the settings in the name of a source; those left out have the task's defaults.

    The name of a document, which is that of its source followed by `#NUMBER`, may also be given.
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


def belongs_to(fact: str, split: str) -> bool:
    """Returns True if a fact, given as a text, belongs to the split according to its hash."""
    return hashlib.sha256(fact.encode()).digest()[0] % 8 in SHARES[split]


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
