"""Large files in buckets, of which only the blocks are copied that are read."""

import errno
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from brt.storage.objects import Bucket

_BLOCK = 1 << 20  # bytes
_KEPT = 256  # This number of blocks of a file is kept in memory.
_THREADS = 8


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
            old = self._blocks.get(number)
            if old is None or (old.done() and old.exception()):  # It may be there again.
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
