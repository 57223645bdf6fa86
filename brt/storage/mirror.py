"""Local copies of places in buckets.

A mirror copies small objects when it is opened or refreshed. What is large is copied when it is
asked for (`fetch`): the arrays of checkpoints. `publish` copies back what has changed since, and
deletes nothing: what was deleted here stays in the bucket unless `removed` says so.
Objects cannot be renamed, so a checkpoint counts when its manifest is there, which is written last
and deleted first. The copy is deleted when the process ends, or, if the process was killed, by the
next one that makes a copy.
"""

import atexit
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brt import durable, formatting, user_cache
from brt.errors import BrtError, BucketError, CheckpointError, ConfigError, closing
from brt.storage.blocks import RemoteFile
from brt.storage.lease import Lease, machine
from brt.storage.objects import ABSENT, Bucket
from brt.storage.places import Place, key_problem, parse

MANIFEST = "MANIFEST.sha256"
CONTROL = "checkpoint_now", "stop_after_evaluation"
# What a run only adds to, arrays, and what need not be small: they are not copied before somebody
# asks for them.
_ON_DEMAND = re.compile(
    r"(.*/)?(checkpoints/\d+/(state|frozen)|tensorboard|wandb)/.*"
    r"|(?!.*\.(json|jsonl|txt|gin|md|csv|png|html|model|jinja|sha256)$).*\.[^/]*",
    re.DOTALL,
)
# What is written once, and does not change afterwards.
_CONSTANT = re.compile(r"(.*/)?(checkpoints/\d+|samples|plots|tokenizer)/.*", re.DOTALL)
# Files of this machine alone: locks, what is not complete, and, of runs, heartbeats.
_LOCAL = re.compile(r"(.*/)?(\.brt\.[0-9a-f]+\.partial|\.[^/]*lock)(/.*)?", re.DOTALL)
_LOCAL_OF_RUN = re.compile(r"(.*/)?(heartbeat|checkpoints/\d+\.(partial|deleted))(/.*)?", re.DOTALL)
_IN_CHECKPOINT = re.compile(r"(?:.*/)?checkpoints/\d+/", re.DOTALL)
_CHECKPOINT = re.compile(rf"((?:.*/)?checkpoints/\d+/){re.escape(MANIFEST)}", re.DOTALL)
# What a run has after its first save, and lists would show in this order.
_ALWAYS = "config.json", "last_checkpoint.txt", "metrics.jsonl", "provenance.json"
_HELD = ".held by brt"  # beside a copy; no object's name is taken for it
_THREADS = 4  # This number of files is copied at a time.
# Of files that are larger than this number of bytes, one is copied back at a time. TensorStore
# needs three times the size of a file in memory.
_LARGE = 128 << 20
# A trainer copies back every _PUBLISH_SECONDS, and less often if a copy takes long: it is to take
# at most a twentieth of the time.
_PUBLISH_SECONDS, _PUBLISH_SHARE = 10, 0.05


class _Stamp(NamedTuple):
    """What tells that a local file is still the one that was copied."""

    size: int
    mtime: int


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:  # A trainer may have removed the file.
        return None
    return _Stamp(status.st_size, status.st_mtime_ns)


class Storage:
    """What a local path stands for. For a path that is no copy, the methods do nothing."""

    def refresh(self) -> None:
        """Copies small objects that are new or have changed since the last copy."""

    def fetch(self, directory: Path) -> None:
        """Copies what is missing below a directory: of a checkpoint, what its manifest lists."""

    def need(self, file: Path) -> None:
        """Copies a file, unless it is there."""

    def remote(self, file: Path, size: int, bounds: np.ndarray | None = None) -> RemoteFile | None:
        """Returns a file of `size` bytes that is read in parts; None if it is there.

        `bounds` are those of its documents (see `RemoteFile`).
        """
        return None

    def publish(self) -> None:
        """Copies back what has changed."""

    def removed(self, path: Path) -> None:
        """Deletes what was deleted locally: a file, or a checkpoint, its manifest first."""

    def publish_file(self, file: Path) -> None:
        """Copies back a file, even if `publish` leaves it out, or another thread is copying."""

    @contextlib.contextmanager
    def held(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Context in which this process alone may write to a run directory, and does so.

        ConfigError is raised if another trainer is there.
        """
        yield

    # True if other hosts do not see what is written to the path.
    apart = False

    def upload(self, source: Path, target: Path) -> None:
        """Copies what is in the directory `source` to the place of another local path."""

    def kvstore(self, directory: Path) -> dict[str, Any]:
        """Returns TensorStore's spec of a directory."""
        return {"driver": "file", "path": f"{directory.absolute()}/"}

    def lock_file(self, file: Path) -> Path:
        """Returns the file of which all processes of this machine see the lock."""
        return file

    def check(self) -> None:
        """Raises CheckpointError if another trainer may have taken over the run directory."""

    def probe(self) -> None:
        """Raises ConfigError, caused by a PermissionError, if nothing may be written there."""


class Mirror(Storage):
    """The local copy `path` of a place in a bucket.

    Only in the copy of a run, of a directory of runs or of a model (`of_run`), names such as
    heartbeat and checkpoints have a meaning.
    """

    apart = True

    def __init__(self, place: Place, path: Path, of_run: bool = True):
        self.place, self.path, self.of_run, self.process = place, path, of_run, os.getpid()
        self.bucket = Bucket(place)
        self._known: dict[str, _Stamp | None] = {}  # what was copied, in either direction
        self._generations: dict[str, bytes] = {}
        self._uploaded: dict[str, _Stamp | None] = {}  # under keys of files that are not there yet
        self._turn = threading.RLock()
        self._lease: Lease | None = None
        self._lost = ""
        self._large = threading.Lock()
        self._probed: set[str] = set()

    def refresh(self) -> None:
        if self._lease:  # What is here is newer than what is in the bucket.
            return
        self._refresh()

    def _refresh(self) -> None:
        with self._turn:
            keys = _without_halves(self._all_keys())
            small = [key for key in keys if not _ON_DEMAND.fullmatch(key)]
            for key in self._known.keys() - keys:
                self._forget(key)
            manifests = {k: g for k, g in self._generations.items() if _CHECKPOINT.fullmatch(k)}
            for key, _ in self.bucket.changed(manifests):  # The checkpoint was written anew.
                directory = key.removesuffix(MANIFEST)
                for part in [known for known in self._known if known.startswith(directory)]:
                    self._forget(part)
            old = {
                key: generation
                for key, generation in self._generations.items()
                if generation and not _CONSTANT.fullmatch(key) and not self._is_changed(key)
            }
            new = [k for k in small if k not in self._known and not self._is_changed(k)]
            for key, found in (*self.bucket.read_all(new), *self.bucket.changed(old)):
                if found:
                    self._store(key, found.generation, [found.content])

    def _all_keys(self) -> list[str]:
        """Returns all keys; ConfigError if the list was refused, which looks like an empty one."""
        for again in False, True:  # An object may have been written since the list was made.
            keys = self._keys()
            if keys or not any(map(self.bucket.exists, sorted({*self._known, *_ALWAYS}))):
                break
            if again:
                raise self.bucket.denied("list")
        return keys

    def _is_changed(self, key: str) -> bool:
        """Returns True if the local file has not been copied back since it was written."""
        return _stamp(self.path / key) not in (None, self._known.get(key))

    def fetch(self, directory: Path) -> None:
        prefix = f"{key}/" if (key := self._key(directory)) else ""
        with self._turn:
            keys = _listed(directory / MANIFEST, prefix) if self.of_run else None
            if keys is None:
                keys = self._keys(prefix)
                keys = _without_halves(keys) if self.of_run else _without_local(keys)
            missing = [key for key in keys if not (self.path / key).exists()]
            with ThreadPoolExecutor(_THREADS, "fetching") as pool:
                for _ in pool.map(self._fetch_one, missing):
                    pass

    def fetch_matching(self, pattern: re.Pattern[str], prefix: str = "") -> int:
        """Copies all objects whose keys a pattern matches, and returns their number.

        All these keys begin with `prefix`.
        """
        with self._turn, ThreadPoolExecutor(_THREADS, "fetching") as pool:
            matching = list(filter(pattern.fullmatch, self._keys(prefix)))
            for _ in pool.map(self._fetch_one, matching):
                pass
        return len(matching)

    def need(self, file: Path) -> None:
        if not file.exists():
            with self._turn:
                self._fetch_one(self._key(file))

    def remote(self, file: Path, size: int, bounds: np.ndarray | None = None) -> RemoteFile | None:
        return None if file.exists() else RemoteFile(self.bucket, self._key(file), size, bounds)

    def _fetch_one(self, key: str) -> None:
        # What is missing in the bucket is missing in the copy, where a reader notices it.
        with contextlib.suppress(FileNotFoundError):
            if not (self.path / key).exists():
                self._store(key, b"", self.bucket.chunks(key))

    def file(self, key: str) -> Path | None:
        """Copies one object, and returns its path; None if there is none."""
        self.need(self.path / key)
        return self.path / key if (self.path / key).exists() else None

    def publish(self) -> None:
        with self._turn:
            found = [(key, _stamp(path)) for key, path in list(self._files())]
            stamps = {key: stamp for key, stamp in found if stamp}
            self._known |= {k: s for k, s in self._uploaded.items() if stamps.get(k) == s}
            changed = [key for key, stamp in stamps.items() if self._known.get(key) != stamp]
            manifests = {key for key in self._known if _CHECKPOINT.fullmatch(key)}
            # A checkpoint that is written anew does not count meanwhile.
            self._delete(sorted(manifests.intersection(changed)))
            for batch in _in_order(changed):
                with ThreadPoolExecutor(_THREADS, "publishing") as pool:
                    paths = (self.path / key for key in batch)
                    generations = pool.map(self._upload, batch, paths)
                    for key, generation in zip(batch, generations, strict=True):
                        if generation is not None:
                            self._known[key], self._generations[key] = stamps[key], generation

    def removed(self, path: Path) -> None:
        with self._turn:
            key = self._key(path)
            self._delete([key for key in (f"{key}/{MANIFEST}", key) if key in self._known])
            self._delete(self.bucket.keys(f"{key}/"))

    def publish_file(self, file: Path) -> None:
        self.bucket.write(self._key(file), file.read_bytes())

    def upload(self, source: Path, target: Path) -> None:
        with self._turn, ThreadPoolExecutor(_THREADS, "publishing") as pool:
            paths = [path for path in source.rglob("*") if path.is_file()]
            keys = [self._key(target / path.relative_to(source)) for path in paths]
            self._uploaded = dict(zip(keys, map(_stamp, paths), strict=True))
            for key, generation in zip(keys, pool.map(self._upload, keys, paths), strict=True):
                if generation is not None:
                    self._generations[key] = generation

    def kvstore(self, directory: Path) -> dict[str, Any]:
        return self.bucket.spec(f"{self._key(directory)}/")

    def probe(self) -> None:
        self._probe("")

    def _probe(self, key: str, *, listed: bool = False) -> None:
        if not self._lease and key not in self._probed:  # The lock has been written.
            self.bucket.probe(key, listed=listed)
            self._probed.add(key)

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._confirm(keys)
            refused = self.bucket.delete({k: self._generations.get(k) or None for k in keys})
            for key in keys:
                self._known.pop(key, None)
                self._generations.pop(key, None)
            # A request to the run that was made anew is one that has not been seen yet.
            if self._lease and (others := {*refused} - {*CONTROL}):
                self._check_now()
                self.bucket.delete(dict.fromkeys(sorted(others)))

    def _upload(self, key: str, path: Path) -> bytes | None:
        """Writes a file to the bucket and returns its generation; None if it is gone."""
        self._confirm([key])
        with contextlib.ExitStack() as stack:
            try:
                size = path.stat().st_size
                self.bucket.check_size(key, size)
                if size > _LARGE:
                    stack.enter_context(self._large)
                content = path.read_bytes()
            except FileNotFoundError:  # It was removed since, as old samples and checkpoints are.
                return None
            if not self._lease:
                return self.bucket.write(key, content)
            # A request may be carried out a long time after the lock was confirmed. Therefore it
            # replaces only what this trainer knows, and never what the next one has written.
            known = self._generations.get(key, ABSENT) or self.bucket.generation(key)
            while (written := self.bucket.write(key, content, replaces=known)) is None:
                self._check_now()
                known = self.bucket.generation(key)
            return written

    def _check_now(self) -> None:
        """Asks the bucket whether this trainer holds the lock; CheckpointError if it does not."""
        if self._lease:
            self._lease.renew()
        self.check()

    @contextlib.contextmanager
    def held(self, warn: Callable[[str], None]) -> Iterator[None]:
        with Lease(self.bucket, str(self.place), warn) as self._lease:
            try:
                self._refresh()
                self._remove_half_checkpoints()
                with closing(self.publish), self._published_regularly(warn):
                    yield
            finally:
                # A copy that another trainer's objects have replaced is of no use any more.
                self._lost, self._lease = self._lease.lost, None
                if self._lost:
                    _mirrors.pop(self.path, None)

    def lock_file(self, file: Path) -> Path:
        # Each process has a copy of its own.
        url = self.bucket.url(self._key(file))
        return self.path.parents[1] / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"

    def check(self) -> None:
        if lost := self._lost or (self._lease.lost if self._lease else ""):
            raise CheckpointError(lost)

    def _confirm(self, keys: Iterable[str]) -> None:
        """Makes sure, before objects are changed, that no other trainer is there."""
        if self._lease:
            # `confirm` trusts the clock of this machine, which stands still while the machine is
            # suspended. Before a checkpoint changes, the bucket itself is asked.
            if any(map(_CHECKPOINT.fullmatch, keys)):
                self._check_now()
            else:
                self._lease.confirm()
        self.check()

    def _remove_half_checkpoints(self) -> None:
        """Deletes what killed trainers have left: checkpoints without a manifest."""
        keys = self._keys("checkpoints/")
        self.bucket.delete(dict.fromkeys(sorted({*keys} - {*_without_halves(keys)})))

    @contextlib.contextmanager
    def _published_regularly(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Context in which a thread copies back logs, and looks for requests to the run."""
        ended = threading.Event()

        def work() -> None:
            pause, said = float(_PUBLISH_SECONDS), False
            while not ended.wait(pause):
                begin = time.monotonic()
                try:
                    self._find_requests()
                    self.publish()
                    said = False
                except CheckpointError:
                    return  # `check` raises it where the run trains.
                except (BucketError, ConfigError, OSError) as error:
                    if not said:
                        warn(f"{error} (the next save tries again)")
                    said = True
                pause = max(_PUBLISH_SECONDS, (time.monotonic() - begin) / _PUBLISH_SHARE)

        thread = threading.Thread(target=work, name="publishing", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _find_requests(self) -> None:
        with self._turn:
            for key, found in self.bucket.read_all(CONTROL):
                if found and key not in self._known:
                    self._store(key, found.generation, [found.content])

    def _keys(self, prefix: str = "") -> list[str]:
        # Consoles create empty objects whose names end with a slash, as directories.
        keys = [key for key in self.bucket.keys(prefix) if key and not key.endswith("/")]
        for key in keys:
            if problem := key_problem(key):
                raise ConfigError(f"{self.bucket.url(key)!r}: the name of this object {problem}")
        return keys

    def _key(self, path: Path) -> str:
        return "/".join(path.relative_to(self.path).parts)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for place, directories, names in os.walk(self.path):
            inside = Path(place)
            directories[:] = [d for d in directories if not self._is_local(self._key(inside / d))]
            for path in map(inside.joinpath, names):
                if not self._is_local(key := self._key(path)):
                    yield key, path

    def _is_local(self, key: str) -> bool:
        return bool(_LOCAL.fullmatch(key) or (self.of_run and _LOCAL_OF_RUN.fullmatch(key)))

    def _store(self, key: str, generation: bytes, content: Iterable[bytes]) -> None:
        path = self.path / key
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path, synced=False) as file:
                file.writelines(content)
        except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
            raise ConfigError(
                f"{self.bucket.url(key)} cannot be copied: another object is called like a "
                "directory above it"
            ) from error
        self._known[key], self._generations[key] = _stamp(path), generation

    def _forget(self, key: str) -> None:
        self._known.pop(key, None), self._generations.pop(key, None)
        (self.path / key).unlink(missing_ok=True)


def _without_local(keys: Iterable[str]) -> list[str]:
    return [key for key in keys if not _LOCAL.fullmatch(key)]


def _without_halves(keys: Iterable[str]) -> list[str]:
    """Returns keys without those of local files, and of checkpoints that lack a manifest."""
    keys = [key for key in _without_local(keys) if not _LOCAL_OF_RUN.fullmatch(key)]
    whole = {found[1] for key in keys if (found := _CHECKPOINT.fullmatch(key))}
    parts = [(key, _IN_CHECKPOINT.match(key)) for key in keys]
    return [key for key, part in parts if not part or part[0] in whole]


def _in_order(keys: Iterable[str]) -> list[list[str]]:
    """Returns keys in three groups to be written one after the other.

    Logs and arrays come first, the manifests that make checkpoints count second, and last what says
    that a checkpoint was saved, or that prepared data are complete.
    """

    def rank(key: str) -> int:
        if _CHECKPOINT.fullmatch(key):
            return 1
        return 2 if key.rpartition("/")[2] in ("last_checkpoint.txt", "corpus.json") else 0

    keys = sorted(keys)
    return [group for i in range(3) if (group := [key for key in keys if rank(key) == i])]


def _listed(manifest: Path, prefix: str) -> list[str] | None:
    """Returns the keys of the files that a manifest lists; None without a manifest."""
    try:
        lines = manifest.read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return None
    names = [line.partition("  ")[2] for line in lines]
    return [f"{prefix}{name}" for name in names if name and not key_problem(name)]


_mirrors: dict[Path, Mirror] = {}


def local(name: str | os.PathLike[str] | Place, asked: str = "") -> str:
    """Returns the local path of the directory of a run, a model or prepared data.

    Of a place in a bucket, it is the path of a copy, which has the small files below the place.
    `asked` is as in `places.parse`. Errors are those of `Bucket`.
    """
    place = name if isinstance(name, Place) else parse(name, asked)
    if isinstance(place, str):
        return place
    if not place.key:
        raise ConfigError(f"{place} is a whole bucket; name a directory in it, {place}/NAME")
    return str(opened(place, of_run=True).path)


def opened(place: Place, *, of_run: bool = False) -> Mirror:
    """Returns the mirror of a place in a bucket; that of a run is refreshed."""
    for mirror in _mirrors.values():
        if mirror.place == place and mirror.of_run == of_run:
            if of_run:
                mirror.refresh()
            return mirror
    path = _new_root() / (place.key.rpartition("/")[2] or place.bucket)
    mirror = Mirror(place, path, of_run)
    if of_run:
        mirror.refresh()
    _mirrors[path] = mirror
    formatting.SHOWN[str(path)] = str(place)
    return mirror


def readable(name: str | os.PathLike[str], asked: str = "") -> str:
    """Returns the local path of a file or directory; from a bucket, all of it is copied."""
    place = parse(name, asked)
    if isinstance(place, str):
        return place
    parent, _, last = place.key.rpartition("/")
    path = opened(place._replace(key=parent)).file(last) if last else None
    if path is None:
        copy = opened(place)
        copy.fetch(path := copy.path)
    return str(path)


def writable(name: str | os.PathLike[str], asked: str = "", *, new: bool = False) -> str:
    """Returns the local path of a file or directory that is copied to a bucket after it is written.

    What is there already is not copied. ConfigError is raised if nothing may be written there.
    """
    place = parse(name, asked)
    if isinstance(place, str):
        return place
    parent, _, last = place.key.rpartition("/")
    if not last:
        raise ConfigError(f"{place} is a bucket; name something in it")
    mirror = opened(place._replace(key=parent))
    mirror._probe(last if new else "", listed=new)
    mirror.path.mkdir(parents=True, exist_ok=True)
    return str(mirror.path / last)


def new_directory(name: str | os.PathLike[str], asked: str = "") -> str:
    """Returns what `writable` does; ConfigError if there are objects below the place already."""
    place = parse(name, asked)
    if isinstance(place, Place) and place.key and (found := _without_local(Bucket(place).keys())):
        raise ConfigError(
            f"{place} has {len(found):,} objects already; name a new place, or delete them"
        )
    return writable(name, asked, new=True)


def shown(path: str | os.PathLike[str]) -> str:
    """Returns the URL of a path in a local copy, or the path itself."""
    text = os.fspath(path)
    for copy, url in tuple(formatting.SHOWN.items()):
        text = text.replace(copy, url)
    return text


def of(path: Path) -> Storage:
    """Returns the mirror that a path belongs to, or a `Storage` that does nothing."""
    parents = (path, *path.parents)
    return next((_mirrors[parent] for parent in parents if parent in _mirrors), Storage())


def publish_all() -> None:
    """Copies back what has changed in all mirrors. If that fails, the copy is kept, and named."""
    for mirror in list(_mirrors.values()):
        try:
            mirror.publish()
        except BrtError as error:
            kept = user_cache.writable() / "unpublished" / mirror.path.parent.name
            user_cache.make(kept.parent)
            os.replace(mirror.path.parent, kept)
            raise type(error)(f"{error} (what was written is in {kept})") from error


def discard_all() -> None:
    """Deletes all copies of this process."""
    for path, mirror in list(_mirrors.items()):
        if mirror.process == os.getpid():
            shutil.rmtree(path.parent, ignore_errors=True)
        _mirrors.pop(path, None)
        formatting.SHOWN.pop(str(path), None)


atexit.register(discard_all)


def _new_root() -> Path:
    """Creates a directory for one copy, and deletes those that killed processes have left."""
    place = user_cache.writable() / "buckets"
    user_cache.make(place)
    with (place / ".lock").open("ab") as turn:  # No other process looks before `root` is locked.
        durable.acquire_lock(turn, wait=True)
        # The locks of other machines may not be seen in a directory that several share.
        own = hashlib.sha256(machine().encode()).hexdigest()[:8]
        for old in place.glob(f"{own}-*"):
            with contextlib.suppress(OSError), (old / _HELD).open("ab") as file:
                if durable.acquire_lock(file):
                    shutil.rmtree(old, ignore_errors=True)
        for old in place.glob("[0-9a-f]*.lock"):  # of `Mirror.lock_file`
            with contextlib.suppress(OSError), old.open("ab") as file:
                if durable.acquire_lock(file):
                    old.unlink()
        root = place / f"{own}-{secrets.token_hex(8)}"
        root.mkdir(mode=0o700)
        # The open file is held until the process ends.
        durable.acquire_lock(os.open(root / _HELD, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))
    return root
