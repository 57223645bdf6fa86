"""Manifests, and directories that exist only when they are complete."""

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from brt.errors import DataError

FORMAT = 1  # of stores and prepared corpora; another format is another cache entry


def read(path: Path) -> dict[str, Any]:
    """A manifest of this format.

    Raises:
      DataError: it is missing, no JSON, or of another format.
    """
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path.parent} holds no finished preparation ({path.name} is missing); "
            "write it with python -m brt.prepare"
        ) from error
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}); prepare {path.parent} again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise DataError(
            f"{path} has format {found}, this brt reads {FORMAT}; prepare {path.parent} again"
        )
    return manifest


def write(path: Path, manifest: Mapping[str, Any]) -> None:
    """Writes JSON that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **manifest}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def undamaged(directory: Path, what: str) -> Iterator[None]:
    """Raises DataError for anything that does not fit in a directory's files."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"the {what} {directory} is damaged ({error}); delete it and prepare it again"
        ) from error


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory that becomes `directory` when the block ends well.

    If another process has made `directory` by then, this one's is dropped.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise DataError(f"{directory} cannot be made: {error.strerror}") from error
    try:
        yield temporary
        temporary.chmod(0o755)
        try:
            temporary.rename(directory)  # replaces an empty directory only
        except OSError:
            if not directory.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """The same for one that nothing may be in; raises DataError otherwise."""
    if directory.exists() and any(directory.iterdir()):
        raise DataError(f"{directory} is not empty; name another directory")
    with atomic_directory(directory) as temporary:
        yield temporary
