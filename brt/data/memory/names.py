"""Sources of memory tasks: `memory:TASK/SPLIT/COUNT?SETTING=VALUE&SETTING=VALUE`.

    task      what a document asks for                                       filler
    copy      the value that it stated                                       dots
    recall    the values of keys that it stated side by side                 dots
    needle    the values of keys that it stated anywhere                     a novel's text
    tracking  where a thing is: where the person who took it last went last  a novel's text
    counting  the number of events, modulo `symbols`                         dots

    setting   meaning
    distance  bytes between a fact and the answer; documents take the values of 32,64,128 in turn
    size      bytes of filler in a document; facts are in the first size - distance bytes; 0 takes
              the distance, so that all facts are at the start
    facts     values or sentences in a document, or the largest number of events
    queries   facts that are asked for; needle asks for all
    symbols   keys; or people, things and places, this many each; or the modulus
    length    hexadecimal digits of a value
    seed      determines every byte, together with the other settings, the split and the number of
              the document

A document belongs to one split. For copy, recall and needle the hash of every value decides, for
tracking and counting that of all sentences or events. So no fact of test occurs in train.
"""

import hashlib
import re
from typing import NamedTuple

from brt.config.fields import MEMORY
from brt.errors import DataError

# The hashes, modulo 8, of the facts of each split.
SHARES = {"train": range(2, 8), "validation": range(1), "test": range(1, 2)}
_USUAL: dict[str, dict[str, int]] = {
    "copy": {"distance": 96, "length": 8},
    "recall": {"distance": 96, "facts": 4, "queries": 4, "symbols": 26, "length": 4},
    "needle": {"distance": 1024, "size": 4096, "facts": 3, "symbols": 26, "length": 6},
    "tracking": {"distance": 256, "size": 768, "facts": 8, "queries": 2, "symbols": 3},
    "counting": {"distance": 128, "size": 384, "facts": 19, "symbols": 10},
}
_SYMBOLS = {"recall": (1, 52), "needle": (1, 52), "tracking": (2, 8), "counting": (2, 10)}
# The fewest digits of a value; with three digits every split has hundreds of values.
_SHORTEST = 3


class Memory(NamedTuple):
    """The settings in the name of a source; the module describes each of them.

    `documents` is the COUNT of the name, and `distance` contains all values that documents take in
    turn.
    """

    task: str
    split: str
    documents: int
    distance: tuple[int, ...]
    size: int
    facts: int = 1
    queries: int = 1
    symbols: int = 1
    length: int = _SHORTEST
    seed: int = 0

    @property
    def novels(self) -> str:
        """The source of the novels that the filler is taken from; "" if the filler consists of
        dots.
        """
        return f"corpus:novels/{self.split}" if self.task in ("needle", "tracking") else ""


def parse(source: str) -> Memory:
    """Returns the settings in the name of a source, or of a document, whose name ends in `#NUMBER`.

    Settings that the name leaves out have their defaults.

    Raises:
      DataError: there is no such task, split or setting, or the settings contradict each other.
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
    """Returns True if the hash of a fact or value assigns it to the split."""
    return hashlib.sha256(fact.encode()).digest()[0] % 8 in SHARES[split]


def _wrong(memory: Memory) -> str:
    """Returns a phrase about settings that contradict each other; "" if there are none."""
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
