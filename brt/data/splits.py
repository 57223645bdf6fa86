"""Divides documents and rows into training, validation and test data."""

import bisect
import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from brt import config
from brt.config.checks import column
from brt.data import documents
from brt.data.documents import Document, Fields
from brt.data.quarantine import Quarantine
from brt.errors import DataError

SPLITS = ("train", "validation", "test")
SHORTEST = 100  # The held-out end of a document has at least this number of characters.
# At most this number of characters is searched for the end of a paragraph, at which a document can
# be cut.
REACH = 1 << 16
# These patterns match the ends of paragraphs, lines and words, after which a document can be cut.
BORDERS = (r"\n[ \t\r]*\n+", r"\n", r"\s")

# A value of this type divides one document. The keys are the names of splits, and the values are
# the range of characters that belongs to the split: the position of the first character, and the
# position after the last one (None for the end of the document).
Parts = dict[str, tuple[int, int | None]]


class Plan:
    """Assignment of documents to the splits of the section `Data`.

    A split without a source gets a part of the documents of Data.train. Documents with the same
    content are in the same split. If there are too few documents for all splits, the end of each
    document is held out instead of whole documents; a document that is too short raises DataError.
    `wanted` are the splits whose documents the caller will read.

    Attributes:
      held_out: for each split without a source, a phrase that says which part of Data.train it is.
      bad: the errors of documents that could not be read.
    """

    def __init__(self, data: config.Data, wanted: Sequence[str] = SPLITS):
        self._data = data
        self.bad = Quarantine(data.max_bad_records)
        self._fractions = fractions_of(data)
        # If a wanted split is a part of Data.train, one of these attributes has an entry for each
        # document of Data.train, in reading order. If whole documents are held out, `_split_of` has
        # the index in SPLITS of the document's split. If ends of documents are held out, `_parts`
        # has the range of each document that belongs to each split.
        self._split_of = np.zeros(0, np.int8)
        self._parts: list[Parts] = []
        what = "{:.0%} of the documents of Data.train"
        if self._fractions and not {"train", *self._fractions}.isdisjoint(wanted):
            names, digests, lengths = _described(self._read("train"))
            distinct, first, content = np.unique(digests, return_index=True, return_inverse=True)
            if len(distinct) > len(self._fractions):
                assigned = assign([names[i] for i in first.tolist()], self._fractions)
                self._split_of = np.array([*map(SPLITS.index, assigned)], np.int8)[content]
            else:
                what = "{:.0%} of each document of Data.train, at its end"
                pairs = zip(self._read("train"), lengths, strict=True)
                self._parts = [held_out_ends(d, length, self._fractions) for d, length in pairs]
        self.held_out = {split: what.format(f) for split, f in self._fractions.items()}

    def documents(self, split: str) -> Iterator[Document]:
        divided = len(self._split_of) or self._parts
        if not divided or (split != "train" and split not in self._fractions):
            yield from self._read(split)
        elif self._parts:
            for document, parts in zip(self._read("train"), self._parts, strict=True):
                if split in parts:
                    yield _cut(document, *parts[split])
        else:
            own = self._split_of == SPLITS.index(split)
            for document, is_own in zip(self._read("train"), own, strict=True):
                if is_own:
                    yield document

    def _read(self, split: str) -> Iterator[Document]:
        return documents.read(
            getattr(self._data, split), fields=fields_of(self._data),
            errors=self._data.errors, bad=self.bad,
        )  # fmt: skip


def fields_of(data: config.Data) -> Fields:
    named = {role: column(data, role) for role in Fields._fields[1:]}
    return Fields(column(data, "text", "text"), **named)


def fractions_of(data: config.Data) -> dict[str, float]:
    """Returns the fraction of Data.train that is held out for each split without a source."""
    fractions = {split: getattr(data, f"{split}_fraction") for split in SPLITS[1:]}
    return {s: fraction for s, fraction in fractions.items() if fraction and not getattr(data, s)}


def assign(names: Sequence[str], fractions: Mapping[str, float]) -> list[str]:
    """Returns the split of each document: "train", or a key of `fractions`.

    The assignment depends on the hashes of the file names (without directories), so the result is
    the same on every machine. Every split gets at least one document.
    """
    splits = ["train"] * len(names)
    order = sorted(range(len(names)), key=lambda i: (_sha256(Path(names[i]).name), names[i]))
    # `free` is the number of documents that remain after every split got one.
    free = len(names) - len(fractions) - 1
    for split, fraction in fractions.items():
        more = min(max(round(fraction * len(names)) - 1, 0), free)
        free -= more
        for _ in range(1 + more):
            splits[order.pop()] = split
    return splits


def held_out_ends(document: Document, length: int, fractions: Mapping[str, float]) -> Parts:
    """Returns the range of a document's characters that belongs to each split.

    The document has `length` characters. Its beginning is for training, and its end is divided
    among the held-out splits. A document that is too short, a pair or a conversation raises
    DataError.
    """
    if document.parts:
        raise DataError(
            f"{document.name} is a pair or a conversation, of which Data.train has too few to hold "
            f"some out for {' and '.join(fractions)}; name files with "
            f"{' and '.join(f'Data.{split}' for split in fractions)}, or set "
            f"{' and '.join(f'Data.{split}_fraction' for split in fractions)} to 0"
        )
    sizes = {split: int(length * fraction) for split, fraction in fractions.items()}
    if min(sizes.values()) < SHORTEST or length - sum(sizes.values()) < SHORTEST:
        splits = " and ".join(sizes)
        raise DataError(
            f"{document.name} has {length:,} characters, too few to hold out its end for {splits} "
            f"(at least {SHORTEST} each); train on more text, or name files with "
            f"{' and '.join(f'Data.{s}' for s in sizes)}, or set "
            f"{' and '.join(f'Data.{s}_fraction' for s in sizes)} to 0"
        )
    start, windows = length - sum(sizes.values()), []
    for size in sizes.values():
        windows.append((start, start + min(size // 2, REACH)))
        start += size
    places = [
        begin + _border(text)
        for (begin, _), text in zip(windows, _texts(document.chunks, windows), strict=True)
    ]
    bounds = zip([0, *places], [*places, None], strict=True)
    return dict(zip(("train", *sizes), bounds, strict=True))


class Shares:
    """Function from the content of a row to the row's split.

    A hash of the content determines the split. `shares` has the fraction of the distinct contents
    that each held-out split gets; every split gets at least one content. Too few distinct contents
    raise a DataError that names `source`.
    """

    def __init__(self, contents: Iterable[str], shares: Mapping[str, float], source: str):
        hashes = sorted(set(map(_hash_of_text, contents)))
        counts = [max(round(share * len(hashes)), 1) for share in shares.values()]
        if len(hashes) <= sum(counts):
            raise DataError(
                f"{source} has {len(hashes)} different row(s), too few to hold some out for "
                f"{' and '.join(shares)}; name files for these, or set them to ()"
            )
        self._splits = (*shares, "train")
        self._firsts = [hashes[sum(counts[: i + 1])] for i in range(len(counts))]

    def __call__(self, content: str) -> str:
        return self._splits[bisect.bisect_right(self._firsts, _hash_of_text(content))]


def _described(found: Iterable[Document]) -> tuple[list[str], np.ndarray, array]:
    """Returns the name, the hash of the text, and the length in characters of every document."""
    # The hashes are an array of 32 bytes per document (dtype S32), because millions of Python
    # objects would need much memory.
    names, digests, lengths = [], bytearray(), array("q")
    for document in found:
        digest, length = hashlib.sha256(), 0
        for chunk in document.chunks:
            digest.update(chunk.encode())
            length += len(chunk)
        names.append(document.name)
        digests += digest.digest()
        lengths.append(length)
    return names, np.frombuffer(digests, "S32"), lengths


def _cut(document: Document, start: int, stop: int | None) -> Document:
    if (start, stop) == (0, None):
        return document
    name = f"{document.name}[{start or ''}:{stop or ''}]"
    return Document(name, _between(document.chunks, start, stop))


def are_beginnings(names: Sequence[str]) -> bool:
    """Returns True if every document of a split is a part of a text that goes on in another split.

    The `names` of such documents end with [:STOP] or [START:STOP].
    """
    return all(re.search(r"\[\d*:\d+\]$", name) for name in names)


def _between(chunks: Iterable[str], start: int, stop: int | None) -> Iterator[str]:
    begin = 0
    for chunk in chunks:
        if stop is not None and begin >= stop:
            return
        yield chunk[max(start - begin, 0) : None if stop is None else stop - begin]
        begin += len(chunk)


def _texts(chunks: Iterable[str], windows: Sequence[tuple[int, int]]) -> list[str]:
    """Returns the text between the start and stop of each window."""
    begin, texts = 0, [""] * len(windows)
    for chunk in chunks:
        for i, (start, stop) in enumerate(windows):
            texts[i] += chunk[max(start - begin, 0) : max(stop - begin, 0)]
        begin += len(chunk)
    return texts


def _border(text: str) -> int:
    """Returns the position after a text's first paragraph, else its first line or word, else 0."""
    matches: Iterator[Any] = (re.search(border, text) for border in BORDERS)
    return next((match.end() for match in matches if match), 0)


def _hash_of_text(text: str) -> int:
    return int.from_bytes(_sha256(text)[:8], "big")


def _sha256(text: str) -> bytes:
    # Names of files may have bytes that are not UTF-8, which Python represents by surrogates.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
