"""Sources of memory tasks: `memory:TASK/SPLIT/COUNT?SETTING=VALUE&SETTING=VALUE`.

    task      what a document asks for                                       among
    copy      the value that it told                                         dots
    recall    the values of keys that it told side by side                   dots
    needle    the values of keys that it told anywhere                       a novel's text
    tracking  the place of a thing: where who took it last went last         a novel's text
    counting  how many events there were, modulo `symbols`                   dots

    setting   what it is
    distance  bytes between what was told and the answer; 32,64,128: of documents in turn
    size      bytes of filler of a document: things are told in the first size - distance of
              them; 0: no more than the distance, so that all is told at the start
    facts     values, sentences, or at most so many events, of a document
    queries   of them that are asked for; a needle's all are
    symbols   keys; people, things and places, so many each; the modulus
    length    hexadecimal digits of a value
    seed      decides every byte, together with the others, the split and the document's number

A document lies in one split: of copy, recall and needle every value, by its hash, of tracking and
counting all sentences or events. So nothing that is asked for in test was told in train.
"""

import hashlib
import re
from typing import NamedTuple

from brt.config.fields import MEMORY
from brt.errors import DataError

SHARES = {"train": range(2, 8), "validation": range(1), "test": range(1, 2)}  # eighths of hashes
_USUAL: dict[str, dict[str, int]] = {
    "copy": {"distance": 96, "length": 8},
    "recall": {"distance": 96, "facts": 4, "queries": 4, "symbols": 26, "length": 4},
    "needle": {"distance": 1024, "size": 4096, "facts": 3, "symbols": 26, "length": 6},
    "tracking": {"distance": 256, "size": 768, "facts": 8, "queries": 2, "symbols": 3},
    "counting": {"distance": 128, "size": 384, "facts": 19, "symbols": 10},
}
_SYMBOLS = {"recall": (1, 52), "needle": (1, 52), "tracking": (2, 8), "counting": (2, 10)}
_SHORTEST = 3  # digits of values that every split still has hundreds of


class Memory(NamedTuple):
    """What a source's name says, with what it leaves out; see the module."""

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
        """The source of its filler; "" of dots."""
        return f"corpus:novels/{self.split}" if self.task in ("needle", "tracking") else ""


def parse(source: str) -> Memory:
    """What the name of a source says, or that of a document, which has `#NUMBER` behind it.

    Raises:
      DataError: there is no such task, split or setting, or settings that cannot be met.
    """
    name = source.partition("#")[0]
    found = re.fullmatch(rf"{MEMORY}(\w+)/(\w+)/([1-9]\d*)(?:\?(.*))?", name)
    if not found or found[1] not in _USUAL or found[2] not in SHARES:
        raise DataError(
            f"{name} must be {MEMORY}TASK/SPLIT/COUNT, as {MEMORY}copy/train/1000?distance=96; "
            f"tasks are {', '.join(_USUAL)}, splits {', '.join(SHARES)}"
        )
    values: dict[str, tuple[int, ...]] = {
        setting: (value,) for setting, value in (_USUAL[found[1]] | {"seed": 0}).items()
    }
    values.setdefault("size", (0,))
    for pair in filter(None, (found[4] or "").split("&")):
        setting, _, value = pair.partition("=")
        several = r"\d+(,\d+)*" if setting == "distance" else r"\d+"
        if setting not in values or not re.fullmatch(several, value):
            raise DataError(
                f"{name}: {pair} must be SETTING=NUMBER; {found[1]} has {', '.join(values)}"
            )
        values[setting] = tuple(map(int, value.split(",")))
    distance, longest = values.pop("distance"), max(values["size"])
    single = {setting: value for setting, (value,) in values.items()}
    single["size"] = longest or max(distance)
    memory = Memory(found[1], found[2], int(found[3]), distance, **single)
    if wrong := _wrong(memory):
        raise DataError(f"{name}: {wrong}")
    return memory


def owned(told: str, split: str) -> bool:
    """Whether what a document tells, or a value, belongs to a split."""
    return hashlib.sha256(told.encode()).digest()[0] % 8 in SHARES[split]


def _wrong(memory: Memory) -> str:
    """Which settings cannot be met, in words; "" where all can."""
    task, facts, symbols, farthest = memory.task, memory.facts, memory.symbols, max(memory.distance)
    low, high = _SYMBOLS.get(task, (1, 1))
    asked, of = (symbols, "symbols") if task == "tracking" else (facts, "facts")
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
    if not 1 <= memory.queries <= asked:
        return f"queries={memory.queries} must be from 1 to {of}={asked}"
    if memory.length < _SHORTEST:
        return (
            f"length={memory.length} must be at least {_SHORTEST}, so that train and test share "
            "no value"
        )
    return ""
