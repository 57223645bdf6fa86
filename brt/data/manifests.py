"""Manifests of prepared data, and directories that appear only when they are complete.

A store is a directory with the prepared data of one split. A corpus is a directory with the stores
of all prepared splits. Each of them has a manifest: a JSON file that describes the content and is
written last.
"""

import contextlib
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from brt import durable, output, untrusted
from brt.errors import DataError

# This is the version of the format of prepared data. The hash that names a directory in the cache
# depends on this version.
FORMAT = 1
CORPUS = "corpus.json"  # The manifest of a corpus has this name.
# As long as a process writes to a temporary directory, it locks the file of this name in the
# directory. Other processes delete temporary directories whose file is not locked.
_HELD = ".held"
# A temporary directory is kept for the next process if its content has a file that this pattern
# matches.
PARTIAL = "partial/*/progress.json"
KEPT_DAYS = 7
_KEPT = KEPT_DAYS * 86400  # seconds


def read(path: Path, kind: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the content of a manifest after checking its format and entries.

    `kind` has the type of each entry, in the notation of `untrusted.check`. A manifest that is
    missing, damaged or of another format raises DataError.
    """
    try:
        manifest = untrusted.read_json(path, {})
        if (file_format := manifest.get("format")) == FORMAT:
            untrusted.check(manifest, kind)
    except OSError as error:
        corpus = corpus_directory(path.parent)
        remedy = "write it with python -m brt.prepare"
        if corpus != path.parent:
            remedy = f"delete {corpus} and prepare it again"
        raise DataError(
            f"{path.parent} holds no finished preparation ({path.name} is missing); {remedy}"
        ) from error
    except ValueError as error:
        raise DataError(
            f"{path} is damaged ({error}); delete {corpus_directory(path.parent)} and prepare it "
            "again"
        ) from error
    if file_format != FORMAT:
        raise DataError(
            f"{path} has format {file_format}, this brt reads {FORMAT}; prepare {path.parent} again"
        )
    return manifest


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"format": FORMAT, **manifest}, indent=1), encoding="utf-8")


def corpus_directory(store: Path) -> Path:
    """Returns the directory to prepare again after damage: the corpus of `store`, or `store`."""
    corpus = store.parent
    return corpus if (corpus / CORPUS).is_file() else store


@contextlib.contextmanager
def explaining_damage(directory: Path, what: str) -> Iterator[None]:
    """Context that converts OSError, ValueError and KeyError to a DataError about damage.

    The message says that `directory` is damaged, and calls it `what`, such as "store".
    """
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        corpus = corpus_directory(directory)
        named = "it" if corpus == directory else corpus
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
    key: str = "",
) -> Iterator[Path]:
    """Context that yields a temporary directory, and renames it to `directory` at the end.

    The temporary directory is deleted instead if an error is raised within the context. Temporary
    directories that killed processes left at the same place are deleted first, except those that
    are kept because of their `key`.

    `key` is a hash of everything that determines the content. If a process with a key is killed or
    interrupted after a part of the content was committed (see `PARTIAL`), the temporary directory
    stays for `KEPT_DAYS` days. A call with the same directory and key continues with this content.

    Args:
      shared: if another process has created `directory` in the meantime, True uses the directory of
        that process, and False raises an error.
      setting: the setting that names the directory, for error messages; "" if the user named it.
      explained: function from the directory to a context that converts OSErrors to errors with a
        helpful message; None converts them to DataErrors.

    Raises:
      DataError: the directory cannot be created.
      OSError: the storage fails, or denies access that it granted when the context began. After
        this error, `directory` does not exist if `shared` is False, so the command can be repeated.
    """
    explain_begin = explained or partial(_explained, setting=setting)
    explain_end = explained or partial(
        _explained, setting=setting, raised_unchanged=durable.storage_refuses
    )
    with contextlib.ExitStack() as stack:
        with explain_begin(directory):
            directory = Path(os.path.realpath(directory))
            directory.parent.mkdir(parents=True, exist_ok=True)
            place = _partial_directory(directory, key, stack) if key else None
            remove_abandoned(directory)
            place = place or _held_directory(directory, key, stack)
            content = place / directory.name
            content.mkdir(exist_ok=True)
        yield content
        with explain_end(directory):
            durable.sync_tree(content)
            _rename(content, directory, shared)


def _rename(content: Path, directory: Path, shared: bool) -> None:
    """Renames a complete directory. If `shared` is False and syncing fails, renames it back."""
    try:
        content.rename(directory)  # Renaming replaces an empty directory, but no other one.
    except OSError:
        if not (shared and directory.exists()):
            raise
    try:
        durable.sync(directory.parent)
    except OSError:
        if not shared:
            # If renaming the directory back fails, too, the error of `sync` is raised nevertheless.
            with contextlib.suppress(OSError):
                directory.rename(content)
        raise


@contextlib.contextmanager
def _explained(
    directory: Path,
    setting: str = "",
    raised_unchanged: Callable[[BaseException], bool] = durable.storage_fails,
) -> Iterator[None]:
    try:
        yield
    # Python raises ValueError if the name of the directory contains a NUL.
    except (OSError, ValueError) as error:
        if raised_unchanged(error):
            raise
        reason = getattr(error, "strerror", None) or error
        remedy = f"set {setting} to" if setting else "name"
        raise DataError(
            f"{str(directory)!r} cannot be created: {reason}; {remedy} a directory that is writable"
        ) from error


def _partial_directory(directory: Path, key: str, stack: contextlib.ExitStack) -> Path | None:
    """Locks and returns the temporary directory that an interrupted process with the same key has
    left; None if there is none. When `stack` exits, it calls `_leave` for the directory.
    """
    for path in directory.parent.glob(f"{glob.escape(_prefix(directory))}*/{_HELD}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as attempt:
            held = attempt.enter_context(durable.open_file(path, "r+b", below=directory.parent))
            if not durable.acquire_lock(held) or held.read(len(key) + 1) != key.encode():
                continue
            if not _is_partial(path.parent):
                continue
            stack.enter_context(attempt.pop_all())
            # The stack calls `_leave` before it releases the lock.
            stack.push(partial(_leave, path.parent))
            return path.parent
    return None


def _prefix(directory: Path) -> str:
    """Returns the beginning of the names of temporary directories, which have at most 255 bytes."""
    return os.fsdecode(os.fsencode(f".{directory.name}")[:240]) + "."


def _is_partial(place: Path) -> bool:
    """Returns True if a temporary directory has a finished part (`PARTIAL`), and no links."""
    return any(place.glob(f"*/{PARTIAL}")) and not any(durable.links(place))


def _leave(place: Path, kind: type[BaseException] | None, *_: Any) -> None:
    """Deletes a temporary directory, except after a KeyboardInterrupt if it has a finished part."""
    # The next process can continue with the finished part.
    if not (kind is KeyboardInterrupt and _is_partial(place)):
        _remove_or_warn(place)


def _held_directory(directory: Path, key: str, stack: contextlib.ExitStack) -> Path:
    """Creates and locks a temporary directory beside `directory`, and stores `key` in it.

    When `stack` exits, it calls `_leave` for the temporary directory.
    """
    while True:
        place = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
        with contextlib.ExitStack() as attempt:
            attempt.callback(_remove_or_warn, place)
            # Until this process holds the lock, another process may lock or delete the new
            # directory. Then the loop creates another directory.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                held = attempt.enter_context(open(place / _HELD, "w"))
                durable.acquire_lock(held)
                if os.path.samestat(os.fstat(held.fileno()), os.stat(place / _HELD)):
                    held.write(key)
                    held.flush()
                    attempt.pop_all()  # From here on, `stack` removes the directory.
                    stack.enter_context(held)
                    stack.push(partial(_leave, place))
                    return place


def remove_abandoned(directory: Path) -> None:
    """Deletes temporary directories next to `directory` that nobody uses or will continue."""
    # Errors are ignored, so some of the temporary directories may remain.
    directory = Path(os.path.realpath(directory))
    parent = directory.parent
    for place in parent.glob(f"{glob.escape(_prefix(directory))}????????"):
        # Processes that were killed early have left empty directories, which rmdir deletes. For
        # other directories, rmdir raises an error, which is ignored.
        with contextlib.suppress(OSError):
            place.rmdir()
    for path in parent.glob(f".*/{_HELD}"):
        # Errors are ignored. They mean that the directory is in use, belongs to another user, is a
        # link, or no longer exists.
        with contextlib.suppress(OSError):
            with durable.open_file(path, "r+b", below=parent) as file:
                age = time.time() - os.fstat(file.fileno()).st_mtime
                if durable.acquire_lock(file) and not (_is_partial(path.parent) and age < _KEPT):
                    _remove(path.parent)


def _remove(place: Path) -> None:
    """Deletes a temporary directory, and last the file that marks the directory as temporary."""
    for path in place.iterdir():
        if path.name != _HELD:
            shutil.rmtree(path)
    shutil.rmtree(place)


def _remove_or_warn(place: Path) -> None:
    try:
        _remove(place)
    except FileNotFoundError:
        pass  # Another process has deleted the directory.
    except OSError as error:
        output.say(
            f"warning: {place} cannot be removed: {error.strerror}; "
            "the same command removes it when it is run again"
        )


def make_empty(directory: Path) -> None:
    """Creates a directory for a new store; raises DataError if it exists and is not empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; name another directory")
