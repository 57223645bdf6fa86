"""Files of data in buckets and on the Hugging Face Hub.

Documents are copied whole. Of the tokens of a store, only the blocks that are read are copied, and
a bounded number of them is kept in memory.
"""

import errno
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from fnmatch import translate
from glob import has_magic
from pathlib import Path

from brt import formatting
from brt.errors import DataError
from brt.storage import hub, mirror, places
from brt.storage.objects import Bucket

_BLOCK = 1 << 20  # bytes
_KEPT = 256  # This number of blocks of a file is kept.
_THREADS = 8


def matching(name: str) -> str:
    """Returns the name of a source of documents, which may be a pattern, as a local path.

    What the name of a place in a bucket or on the hub matches is copied. Other names are returned
    as they are.
    """
    place = places.parse(name)
    if isinstance(place, str):
        return place if place != name else name
    if place.scheme == "hf":
        return _on_hub(place)
    if not has_magic(place.key):
        return mirror.readable(name)
    parts = place.key.split("/")
    fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    copy = mirror.opened(place._replace(key="/".join(parts[:fixed])))
    pattern = "/".join(parts[fixed:])
    copy.fetch_matching(_regular_expression(pattern))
    return str(copy.path / pattern)


def tokenizer(name: str) -> str:
    """Returns the local path of the file of a tokenizer; the small files beside it are copied."""
    place = places.parse(name)
    if isinstance(place, str):
        return place
    parent, _, last = place.key.rpartition("/")
    copy = Path(mirror.local(place._replace(key=parent)))
    mirror.of(copy).need(copy / last)
    return str(copy / last)


def _on_hub(place: places.Place) -> str:
    """Fetches files of a data set of the hub: hf://datasets/OWNER/NAME[@REVISION]/PATTERN."""
    kind, _, rest = place.key.partition("/")
    owner, _, rest = rest.partition("/")
    name, _, pattern = rest.partition("/")
    if kind != "datasets" or not name:
        raise DataError(f"{place} names no data set; write hf://datasets/OWNER/NAME/FILES")
    name, _, revision = name.partition("@")
    patterns = [pattern] if has_magic(pattern) else [pattern, f"{pattern}/*"] if pattern else ["*"]
    path = hub.fetch(str(place), f"{owner}/{name}", revision or None, patterns, kind="dataset")
    formatting.SHOWN[str(path)] = str(place._replace(key=f"{kind}/{owner}/{name}"))
    return str(path / pattern) if pattern else str(path)


def _regular_expression(pattern: str) -> re.Pattern[str]:
    """Returns what the keys of a pattern match; ** stands for any number of directories."""
    parts = [
        "(?:[^/]+/)*" if part == "**" else translate(part).replace(".*", "[^/]*") + "/"
        for part in pattern.split("/")
    ]
    joined = "".join(parts).replace(r"\Z", "").replace(r"\z", "").removesuffix("/")
    return re.compile(joined, re.DOTALL)


class RemoteFile:
    """A file in a bucket, of which blocks are copied when they are read, or are about to be."""

    def __init__(self, bucket: Bucket, key: str, size: int):
        self._bucket, self._key, self._size = bucket, key, size
        self._generation: bytes | None = None
        self._turn = threading.Lock()
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._pool = ThreadPoolExecutor(_THREADS, "blocks")

    def read(self, start: int, count: int) -> bytes:
        """Returns `count` bytes from `start`; an OSError says that they cannot be read."""
        first, last = start // _BLOCK, (start + count - 1) // _BLOCK
        wanted = [self._block(number) for number in range(first, last + 1)]
        if (last + 1) * _BLOCK < self._size:
            self._block(last + 1)  # A row of a batch goes on reading there.
        content = b"".join(block.result() for block in wanted)
        return content[start - first * _BLOCK :][:count]

    def _block(self, number: int) -> Future[bytes]:
        with self._turn:
            if number not in self._blocks:
                self._blocks[number] = self._pool.submit(self._fetch, number)
                if len(self._blocks) > _KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(number)
            return self._blocks[number]

    def _fetch(self, number: int) -> bytes:
        start = number * _BLOCK
        part = self._bucket.part(self._key, start, min(start + _BLOCK, self._size))
        self._generation = self._generation or part.generation
        if part.generation != self._generation:
            url = self._bucket.url(self._key)
            raise OSError(errno.ESTALE, "it was replaced while it was read", url)
        return part.content
