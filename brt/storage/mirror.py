"""Local copies of places in buckets.

A mirror copies small objects when it is opened or refreshed. Large objects, such as the arrays of
checkpoints, are copied when they are asked for (`fetch`). `publish` copies a file to the bucket if
the file has changed since it was copied. `publish` deletes nothing in the bucket: a file that was
deleted here stays there until `removed` deletes it.

In a bucket, a finished checkpoint cannot be marked by renaming it, because objects cannot be
renamed. A checkpoint therefore counts as complete when its manifest exists; the manifest is written
last and deleted first. A local copy is deleted when the process ends. If the process was killed,
the next process that makes a copy deletes the old one.
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
# Files that are copied only on request: arrays, logs of TensorBoard and Weights & Biases, and files
# whose endings do not show that they are small.
_ON_DEMAND = re.compile(
    r"(.*/)?(checkpoints/\d+/(state|frozen)|tensorboard|wandb)/.*"
    r"|(?!.*\.(json|jsonl|txt|gin|md|csv|png|html|model|jinja|sha256)$).*\.[^/]*",
    re.DOTALL,
)
# Files that are written once and do not change afterwards.
_CONSTANT = re.compile(r"(.*/)?(checkpoints/\d+|samples|plots|tokenizer)/.*", re.DOTALL)
# Files that stay on this machine: locks, incomplete files and, in runs, heartbeats.
_LOCAL = re.compile(r"(.*/)?(\.brt\.[0-9a-f]+\.partial|\.[^/]*lock)(/.*)?", re.DOTALL)
_LOCAL_OF_RUN = re.compile(r"(.*/)?(heartbeat|checkpoints/\d+\.(partial|deleted))(/.*)?", re.DOTALL)
_IN_CHECKPOINT = re.compile(r"(?:.*/)?checkpoints/\d+/", re.DOTALL)
_CHECKPOINT = re.compile(rf"((?:.*/)?checkpoints/\d+/){re.escape(MANIFEST)}", re.DOTALL)
# Every run has these files after its first save. If one of these files exists in the bucket, but a
# list of the bucket's objects is empty, the list is wrong.
_ALWAYS = "config.json", "last_checkpoint.txt", "metrics.jsonl", "provenance.json"
_HELD = ".held by brt"  # the lock file of a local copy
_THREADS = 4  # This number of files is copied at a time.
# Files that are larger than this number of bytes are copied back one at a time, because TensorStore
# needs memory for three times the size of a file.
_LARGE = 128 << 20
# A trainer copies its changes back every _PUBLISH_SECONDS, or less often if the copying would take
# more than _PUBLISH_SHARE of the time.
_PUBLISH_SECONDS, _PUBLISH_SHARE = 10, 0.05


class _Stamp(NamedTuple):
    """Size and modification time of a local file, which show whether the file was changed."""

    size: int
    mtime: int


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:  # A trainer may have removed the file.
        return None
    return _Stamp(status.st_size, status.st_mtime_ns)


class Storage:
    """The storage of a local path. In this class, the methods copy nothing.

    Their docstrings say what they do in the subclass `Mirror`.
    """

    def refresh(self) -> None:
        """Copies small objects that are new or have changed since the last copy."""

    def fetch(self, directory: Path) -> None:
        """Copies the missing files of a directory (of a checkpoint, those in its manifest)."""

    def need(self, file: Path) -> None:
        """Copies a file from the bucket, unless the local copy has it."""

    def remote(self, file: Path, size: int, bounds: np.ndarray | None = None) -> RemoteFile | None:
        """Returns a file of `size` bytes that is read in parts; None if it is on this machine.

        `bounds` says where the documents of the file begin and end (see `RemoteFile`).
        """
        return None

    def publish(self) -> None:
        """Copies changed files to the bucket."""

    def removed(self, path: Path) -> None:
        """Deletes in the bucket what was deleted here; the manifest of a checkpoint goes first."""

    def publish_file(self, file: Path) -> None:
        """Copies a file to the bucket at once, even if `publish` leaves the file out.

        The method does not wait for other threads that copy files.
        """

    @contextlib.contextmanager
    def held(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Context in which only this process may write to a run directory.

        Changes are copied to the bucket regularly and at the end. `warn` is called with warnings.
        ConfigError is raised if another trainer uses the directory.
        """
        yield

    # True if other hosts do not see what is written to the path.
    apart = False

    def upload(self, source: Path, target: Path) -> None:
        """Copies the files below `source` to the place in the bucket that `target` stands for."""

    def kvstore(self, directory: Path) -> dict[str, Any]:
        """Returns TensorStore's spec of a directory."""
        return {"driver": "file", "path": f"{directory.absolute()}/"}

    def lock_file(self, file: Path) -> Path:
        """Returns the file to lock instead of `file`; all processes of the machine get the same."""
        return file

    def check(self) -> None:
        """Raises CheckpointError if another trainer may have taken over the run directory."""

    def probe(self) -> None:
        """Raises ConfigError, caused by a PermissionError, if the place may not be written to."""


class Mirror(Storage):
    """The local copy `path` of a place in a bucket.

    Names such as heartbeat and checkpoints have a meaning only if the place is a run, a directory
    of runs or a model (`of_run`).
    """

    apart = True

    def __init__(self, place: Place, path: Path, of_run: bool = True):
        self.place, self.path, self.of_run, self.process = place, path, of_run, os.getpid()
        self.bucket = Bucket(place)
        self._known: dict[str, _Stamp | None] = {}  # stamps at the time of the copy, by key
        self._generations: dict[str, bytes] = {}
        self._uploaded: dict[str, _Stamp | None] = {}  # as `_known`, for files of `upload`
        self._turn = threading.RLock()
        self._lease: Lease | None = None
        self._lost = ""
        self._large = threading.Lock()
        self._probed: set[str] = set()

    def refresh(self) -> None:
        if self._lease:  # This process holds the lock, so its files are newer than the bucket's.
            return
        self._refresh()

    def _refresh(self) -> None:
        with self._turn:
            keys = _without_halves(self._all_keys())
            small = [key for key in keys if not _ON_DEMAND.fullmatch(key)]
            for key in self._known.keys() - keys:
                self._forget(key)
            manifests = {k: g for k, g in self._generations.items() if _CHECKPOINT.fullmatch(k)}
            for key, _ in self.bucket.changed(manifests):  # This checkpoint was written anew.
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
        """Returns all keys; raises ConfigError if the list is empty because it was refused."""
        for again in False, True:  # Objects may have been written after the first list was made.
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
        """Copies all objects whose keys match and begin with `prefix`; returns their number."""
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
        # An object that is missing in the bucket stays missing here, where its reader notices it.
        with contextlib.suppress(FileNotFoundError):
            if not (self.path / key).exists():
                self._store(key, b"", self.bucket.chunks(key))

    def file(self, key: str) -> Path | None:
        """Copies an object unless it is here, and returns its path; None if it does not exist."""
        self.need(self.path / key)
        return self.path / key if (self.path / key).exists() else None

    def publish(self) -> None:
        with self._turn:
            found = [(key, _stamp(path)) for key, path in list(self._files())]
            stamps = {key: stamp for key, stamp in found if stamp}
            self._known |= {k: s for k, s in self._uploaded.items() if stamps.get(k) == s}
            changed = [key for key, stamp in stamps.items() if self._known.get(key) != stamp]
            manifests = {key for key in self._known if _CHECKPOINT.fullmatch(key)}
            # A checkpoint is invalid while it is written anew, as its manifest is deleted first.
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
        if not self._lease and key not in self._probed:  # A held lock shows that writing works.
            self.bucket.probe(key, listed=listed)
            self._probed.add(key)

    def _delete(self, keys: list[str]) -> None:
        if keys:
            self._confirm(keys)
            refused = self.bucket.delete({k: self._generations.get(k) or None for k in keys})
            for key in keys:
                self._known.pop(key, None)
                self._generations.pop(key, None)
            # A control file that was replaced meanwhile is a new request to the run, and is kept.
            if self._lease and (others := {*refused} - {*CONTROL}):
                self._check_now()
                self.bucket.delete(dict.fromkeys(sorted(others)))

    def _upload(self, key: str, path: Path) -> bytes | None:
        """Writes a file to the bucket and returns its generation; None if the file is gone."""
        self._confirm([key])
        with contextlib.ExitStack() as stack:
            try:
                size = path.stat().st_size
                self.bucket.check_size(key, size)
                if size > _LARGE:
                    stack.enter_context(self._large)
                content = path.read_bytes()
            except FileNotFoundError:  # A run deletes old samples and checkpoints.
                return None
            if not self._lease:
                return self.bucket.write(key, content)
            # The bucket may write an object long after the lock was confirmed. Therefore a write
            # replaces only a generation that this trainer knows, and never an object that the next
            # trainer has written.
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
                # After another trainer has taken over, the copy is of no use any more.
                self._lost, self._lease = self._lease.lost, None
                if self._lost:
                    _mirrors.pop(self.path, None)

    def lock_file(self, file: Path) -> Path:
        # Each process has its own copy, so a file in the copy would lock out nobody.
        url = self.bucket.url(self._key(file))
        return self.path.parents[1] / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.lock"

    def check(self) -> None:
        if lost := self._lost or (self._lease.lost if self._lease else ""):
            raise CheckpointError(lost)

    def _confirm(self, keys: Iterable[str]) -> None:
        """Raises CheckpointError, before objects change, if another trainer has taken over."""
        if self._lease:
            # `confirm` trusts the clock of this machine, which may stand still while a virtual
            # machine is suspended. Before a checkpoint changes, the bucket itself is asked.
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
        """Context in which a thread copies changes back, and fetches new `CONTROL` files."""
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
                    return  # `check` raises it in the thread that trains.
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
        # To show directories, the consoles of the services create empty objects whose names end
        # with a slash.
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
    """Leaves out the keys of files that stay local and of checkpoints without a manifest."""
    keys = [key for key in _without_local(keys) if not _LOCAL_OF_RUN.fullmatch(key)]
    whole = {found[1] for key in keys if (found := _CHECKPOINT.fullmatch(key))}
    parts = [(key, _IN_CHECKPOINT.match(key)) for key in keys]
    return [key for key, part in parts if not part or part[0] in whole]


def _in_order(keys: Iterable[str]) -> list[list[str]]:
    """Returns keys in up to three groups, which are written one after the other.

    Logs, arrays and most other files come first. Then come the manifests, which make checkpoints
    valid. Last come the files that say that a checkpoint was saved or that prepared data are
    complete.
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

    If the directory is in a bucket, the result is the path of a copy that has the small files of
    the directory. `asked` is as in `places.parse`. Failed requests raise the errors that `Bucket`
    describes.
    """
    place = name if isinstance(name, Place) else parse(name, asked)
    if isinstance(place, str):
        return place
    if not place.key:
        raise ConfigError(f"{place} is a whole bucket; name a directory in it, {place}/NAME")
    return str(opened(place, of_run=True).path)


def opened(place: Place, *, of_run: bool = False) -> Mirror:
    """Returns the mirror of a place in a bucket, refreshed if `of_run` (see `Mirror`) is True."""
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
    """Returns the local path of a file or directory; all of it is copied if it is in a bucket."""
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
    """Returns the local path to write to; `publish` copies its files if `name` is in a bucket.

    Existing objects are not copied to this machine. ConfigError is raised if the place may not be
    written to. For a `new` directory, it is also raised if the objects of the directory may not be
    listed. `asked` is as in `places.parse`.
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
    """Returns what `writable` returns; raises ConfigError if there are objects below the place."""
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
    """Copies back the changes of all mirrors. If this fails, the error says where they are kept."""
    for mirror in list(_mirrors.values()):
        try:
            mirror.publish()
        except BrtError as error:
            kept = user_cache.writable() / "unpublished" / mirror.path.parent.name
            user_cache.make(kept.parent)
            os.replace(mirror.path.parent, kept)
            raise type(error)(f"{error} (what was written is in {kept})") from error


def discard_all() -> None:
    """Deletes the local copies of buckets that this process made."""
    for path, mirror in list(_mirrors.items()):
        if mirror.process == os.getpid():
            shutil.rmtree(path.parent, ignore_errors=True)
        _mirrors.pop(path, None)
        formatting.SHOWN.pop(str(path), None)


atexit.register(discard_all)


def _new_root() -> Path:
    """Creates a directory for one copy, and deletes the copies that killed processes have left."""
    place = user_cache.writable() / "buckets"
    user_cache.make(place)
    with (place / ".lock").open("ab") as turn:  # No other process sees `root` unlocked.
        durable.acquire_lock(turn, wait=True)
        # Machines that share the directory may not see each other's locks, so each machine deletes
        # only its own copies.
        own = hashlib.sha256(machine().encode()).hexdigest()[:8]
        for old in place.glob(f"{own}-*"):
            with contextlib.suppress(OSError), (old / _HELD).open("ab") as file:
                if durable.acquire_lock(file):
                    shutil.rmtree(old, ignore_errors=True)
        for old in place.glob("[0-9a-f]*.lock"):  # files of `Mirror.lock_file`
            with contextlib.suppress(OSError), old.open("ab") as file:
                if durable.acquire_lock(file):
                    old.unlink()
        root = place / f"{own}-{secrets.token_hex(8)}"
        root.mkdir(mode=0o700)
        # The process keeps this lock until it ends.
        durable.acquire_lock(os.open(root / _HELD, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))
    return root
