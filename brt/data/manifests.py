"""Manifests of prepared data, and directories that appear only when they are complete."""

import contextlib
import glob
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from brt import durable, locks, untrusted
from brt.errors import DataError

# The number of the format of stores and prepared data; it is part of the key in the cache.
FORMAT = 1
CORPUS = "corpus.json"  # The name of the manifest of a directory with several stores.
# The name of the file in a temporary directory that a process locks while it writes there.
_HELD = ".held"


def read(path: Path, kind: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the content of a manifest after checking its format and entries.

    Args:
      path: the file.
      kind: the expected entries and their types; see `untrusted.check`.

    Raises:
      DataError: the manifest is missing, damaged, or has another format.
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
    """Writes a manifest as JSON, together with the number of the format."""
    path.write_text(json.dumps({"format": FORMAT, **manifest}, indent=1), encoding="utf-8")


def corpus_directory(store: Path) -> Path:
    """Returns the directory that must be prepared again if a store is damaged.

    It is the parent directory with all splits if the store belongs to a corpus, otherwise the
    store.
    """
    corpus = store.parent
    return corpus if (corpus / CORPUS).is_file() else store


@contextlib.contextmanager
def explaining_damage(directory: Path, what: str) -> Iterator[None]:
    """Context that turns errors while reading a damaged directory into a DataError with a remedy.

    Args:
      directory: the directory that is read.
      what: what the directory is, for the error message.
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
) -> Iterator[Path]:
    """Creates a temporary directory that is renamed to `directory` when the block succeeds.

    Temporary directories that killed processes left next to it are deleted first
    (`remove_abandoned`).

    Args:
      directory: the final directory; symbolic links are followed.
      shared: True discards this result if another process has created `directory` meanwhile;
        False raises an error.
      setting: the setting that names the directory, for error messages; "" if the user named it.
      explained: a context that converts OSErrors; None converts them to DataErrors.

    Raises:
      DataError: the directory cannot be created.
      OSError: the storage fails, or it denies access that it granted when the block began. If
        `directory` is not shared, it does not exist then, so the command can be run again.
    """
    begins = explained or partial(_explained, setting=setting)
    ends = explained or partial(_explained, setting=setting, refused=durable.storage_refuses)
    with contextlib.ExitStack() as stack:
        with begins(directory):
            directory = Path(os.path.realpath(directory))
            directory.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(directory)
            place = _held_directory(directory, stack)
            content = place / directory.name
            content.mkdir()
        yield content
        with ends(directory):
            durable.sync_tree(content)
            _rename(content, directory, shared)


def _rename(content: Path, directory: Path, shared: bool) -> None:
    """Renames a complete directory; if the name cannot be made durable, removes the name again."""
    try:
        content.rename(directory)  # Renaming replaces an empty directory, but no other one.
    except OSError:
        if not (shared and directory.exists()):
            raise
    try:
        durable.sync(directory.parent)
    except OSError:
        if not shared:
            # The error of `sync` is raised, not one that occurs while its effects are undone.
            with contextlib.suppress(OSError):
                directory.rename(content)
        raise


@contextlib.contextmanager
def _explained(
    directory: Path,
    setting: str = "",
    refused: Callable[[BaseException], bool] = durable.storage_fails,
) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # A NUL in the name raises ValueError.
        if refused(error):
            raise
        reason = getattr(error, "strerror", None) or error
        remedy = f"set {setting} to" if setting else "name"
        raise DataError(
            f"{str(directory)!r} cannot be created: {reason}; {remedy} a directory that is writable"
        ) from error


def _held_directory(directory: Path, stack: contextlib.ExitStack) -> Path:
    """Creates a locked temporary directory next to `directory`; the stack deletes it at its end."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        with contextlib.ExitStack() as attempt:
            attempt.callback(_remove_or_warn, place)
            # Until this process holds the lock, another process may delete the new directory.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                held = attempt.enter_context(open(place / _HELD, "w"))
                locks.acquire(held)
                if os.path.samestat(os.fstat(held.fileno()), os.stat(place / _HELD)):
                    stack.enter_context(attempt.pop_all())
                    return place


def remove_abandoned(directory: Path) -> None:
    """Deletes temporary directories next to `directory` that no process uses, as far as it can.

    Args:
      directory: a directory that `atomic_directory` created or will create.
    """
    directory = Path(os.path.realpath(directory))
    parent = directory.parent
    for place in parent.glob(f".{glob.escape(directory.name)}.????????"):
        # rmdir fails if the directory is not empty or no longer exists.
        with contextlib.suppress(OSError):
            place.rmdir()
    for path in parent.glob(f".*/{_HELD}"):
        # A directory may be in use, belong to another user, be a link, or no longer exist.
        with contextlib.suppress(OSError):
            with durable.open_file(path, "r+b", below=parent) as file:
                if locks.acquire(file):
                    _remove(path.parent)


def _remove(place: Path) -> None:
    """Deletes a temporary directory; deletes the file that marks it as temporary last."""
    for path in place.iterdir():
        if path.name != _HELD:
            shutil.rmtree(path)
    shutil.rmtree(place)


def _remove_or_warn(place: Path) -> None:
    try:
        _remove(place)
    except FileNotFoundError:  # Another process has deleted the directory.
        pass
    except OSError as error:
        print(
            f"warning: {place} cannot be removed: {error.strerror}; "
            "the same command removes it when it is run again",
            file=sys.stderr,
        )


def make_empty(directory: Path) -> None:
    """Creates a directory for a new store; raises DataError if it exists and is not empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; name another directory")
