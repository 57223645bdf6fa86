"""Manifests, and directories that exist only when they are complete."""

import contextlib
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from brt import durable, locks, untrusted
from brt.errors import DataError

FORMAT = 1  # of stores and prepared corpora; another format is another cache entry
CORPUS = "corpus.json"  # the manifest of a directory whose stores were prepared together
_HELD = ".held"  # in a temporary directory: locked as long as a process fills it


def read(path: Path, kind: Mapping[Any, Any]) -> dict[str, Any]:
    """A manifest of this format.

    Args:
      kind: what it has to have; see `untrusted.check`.

    Raises:
      DataError: it is missing, damaged, or of another format.
    """
    try:
        manifest = untrusted.read_json(path, {})
        if (found := manifest.get("format")) == FORMAT:
            untrusted.check(manifest, kind)
    except OSError as error:
        whole = preparation(path.parent)
        remedy = "write it with python -m brt.prepare"
        if whole != path.parent:
            remedy = f"delete {whole} and prepare it again"
        raise DataError(
            f"{path.parent} holds no finished preparation ({path.name} is missing); {remedy}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}); delete {preparation(path.parent)} and prepare it again"
        ) from error
    if found != FORMAT:
        raise DataError(
            f"{path} has format {found}, this brt reads {FORMAT}; prepare {path.parent} again"
        )
    return manifest


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes JSON with this format's number."""
    path.write_text(json.dumps({"format": FORMAT, **manifest}, indent=1), encoding="utf-8")


def preparation(store: Path) -> Path:
    """What has to be made anew where a store is damaged: all splits that were prepared with it."""
    whole = store.parent
    return whole if (whole / CORPUS).is_file() else store


@contextlib.contextmanager
def undamaged(directory: Path, what: str) -> Iterator[None]:
    """Raises DataError for anything that does not fit in a directory's files."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        whole = preparation(directory)
        named = "it" if whole == directory else whole
        raise DataError(
            f"the {what} {directory} is damaged ({error}); delete {named} and prepare it again"
        ) from error


@contextlib.contextmanager
def atomic_directory(
    directory: Path,
    *,
    shared: bool = True,
    setting: str = "",
    explained: Callable[[Path], AbstractContextManager[None]] | None = None,
) -> Iterator[Path]:
    """A temporary directory that becomes `directory`, for good, when the block ends well.

    What killed processes left of others beside it goes first.

    Args:
      directory: where it is to be; a link to another place is followed, for the user named it.
      shared: whether this one is dropped if another process has made `directory` by then.
      setting: that says where it is, for the message; "": the user gave its name.
      explained: a context that makes something else than a DataError of an OSError.

    Raises:
      DataError: it cannot be made.
    """
    explained = explained or partial(_explained, setting=setting)
    with contextlib.ExitStack() as stack:
        with explained(directory):
            directory = Path(os.path.realpath(directory))
            directory.parent.mkdir(parents=True, exist_ok=True)
            _clean(directory)
            place = _held_directory(directory, stack)
            content = place / directory.name
            content.mkdir()
        yield content
        with explained(directory):
            durable.sync_tree(content)
            try:
                content.rename(directory)  # replaces an empty directory only
            except OSError:
                if not (shared and directory.exists()):
                    raise
            durable.sync(directory.parent)


@contextlib.contextmanager
def _explained(directory: Path, setting: str = "") -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if durable.storage_fails(error):
            raise
        reason = getattr(error, "strerror", None) or error
        remedy = f"set {setting} to" if setting else "name"
        raise DataError(
            f"{str(directory)!r} cannot be made: {reason}; {remedy} one that can be written"
        ) from error


def _held_directory(directory: Path, stack: contextlib.ExitStack) -> Path:
    """Makes one beside `directory` that is held until the stack ends, and is gone then."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        with contextlib.ExitStack() as own:
            own.callback(shutil.rmtree, place, ignore_errors=True)
            # Before it was held, another process's `_clean` may have taken it for a killed one's.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                held = own.enter_context(open(place / _HELD, "w"))
                locks.acquire(held)
                if os.path.samestat(os.fstat(held.fileno()), os.stat(place / _HELD)):
                    stack.enter_context(own.pop_all())
                    return place


def _clean(directory: Path) -> None:
    """Removes temporary directories that nobody fills any more, and empty ones of `directory`."""
    parent = directory.parent
    for place in parent.glob(f".{glob.escape(directory.name)}.????????"):
        with contextlib.suppress(OSError):  # it is not empty, or gone by now
            place.rmdir()
    for path in parent.glob(f".*/{_HELD}"):
        # Somebody is at work there, it is another user's, a link, or gone by now.
        with contextlib.suppress(OSError):
            with durable.open_file(path, "r+b", below=parent) as file:
                if locks.acquire(file):
                    shutil.rmtree(path.parent, ignore_errors=True)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """The same for one that nothing may be in; raises DataError otherwise."""
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; name another directory")
    with atomic_directory(directory, shared=False) as temporary:
        yield temporary
