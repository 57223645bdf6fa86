"""Reads large files in buckets, and copies only those parts that are read."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from brt.storage.objects import Bucket

_BLOCK = 1 << 20  # bytes
_KEPT = 256  # Number of parts of a file that are kept in memory; `expect` may raise it.
_THREADS = 32


class RemoteFile:
    """A file in a bucket, whose parts are copied when they are read or will probably be read.

    A part is a block of the file. If `bounds` (int64 [documents + 1], in bytes) says where
    documents begin and end, blocks are divided there, so that a part belongs to one document. As
    the rows of a batch read documents in random order, bytes of a neighbouring document would
    mostly be copied in vain. The place of a part is the pair (position of its first byte, position
    after its last byte).
    """

    def __init__(self, bucket: Bucket, key: str, size: int, bounds: np.ndarray | None = None):
        self._bucket, self._key, self._size, self._bounds = bucket, key, size, bounds
        self._generation: bytes | None = None
        self._turn = threading.Lock()
        self._parts: OrderedDict[tuple[int, int], Future[bytes]] = OrderedDict()
        self._kept = _KEPT
        self._pool = ThreadPoolExecutor(_THREADS, "blocks")

    def read(self, start: int, count: int) -> bytes:
        """Returns `count` bytes from `start` on; raises OSError if they cannot be read."""
        places = self._places(start, count)
        wanted = [self._part(place) for place in places]
        if following := self._following(places[-1]):
            self._part(following)  # The reader will probably continue there.
        content = b"".join(part.result() for part in wanted)
        return content[start - places[0][0] :][:count]

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Begins to copy ranges that are read next; a range is (first byte, number of bytes)."""
        places = {place for start, count in ranges for place in self._places(start, count)}
        self._kept = max(_KEPT, 2 * len(places))
        for place in sorted(places):
            self._part(place)

    def _places(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns the places of the parts that contain the `count` bytes from `start` on."""
        whole = self._place(start)
        if start + count <= whole[1]:
            return [whole]
        # A range that spans several documents is read in order, so its blocks are not divided.
        same = self._bounds is None or start + count <= self._document(start)[1]
        places, end = [], start + count
        while start < end:
            places.append(self._place(start) if same else self._block(start))
            start = places[-1][1]
        return places

    def _place(self, at: int) -> tuple[int, int]:
        (start, end), (first, last) = self._block(at), self._document(at)
        return max(start, first), min(end, last)

    def _block(self, at: int) -> tuple[int, int]:
        start = at // _BLOCK * _BLOCK
        return start, min(start + _BLOCK, self._size)

    def _document(self, at: int) -> tuple[int, int]:
        if self._bounds is None:
            return 0, self._size
        index = int(np.searchsorted(self._bounds, at, side="right"))
        return int(self._bounds[index - 1]), int(self._bounds[index])

    def _following(self, place: tuple[int, int]) -> tuple[int, int] | None:
        end = place[1]
        return self._place(end) if end < self._document(place[1] - 1)[1] else None

    def _part(self, place: tuple[int, int]) -> Future[bytes]:
        with self._turn:
            old = self._parts.get(place)
            if old is None or (old.done() and old.exception()):  # A failed copy is repeated.
                self._parts[place] = self._pool.submit(self._fetch, *place)
                while len(self._parts) > self._kept:
                    self._parts.popitem(last=False)
            self._parts.move_to_end(place)
            return self._parts[place]

    def _fetch(self, start: int, end: int) -> bytes:
        part = self._bucket.part(self._key, start, end)
        self._generation = self._generation or part.generation
        if part.generation != self._generation:
            url = self._bucket.url(self._key)
            raise OSError(errno.ESTALE, "it was replaced while it was read", url)
        return part.content
