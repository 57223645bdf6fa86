"""A cache of prepared data, so that the same files and settings are prepared only once.

Data are prepared by tokenizing the files and writing the result to a directory. The directory has
a subdirectory for each split (train, validation, test), the tokenizer, and the manifest
corpus.json, which describes sources and settings and is written last. The name of the directory is
a hash of everything that determines its content.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from brt import output, untrusted, user_cache
from brt.config.fields import cached_settings
from brt.data import manifests
from brt.data.sources import FileHash
from brt.data.splits import SPLITS
from brt.errors import DataError

MANIFEST = manifests.CORPUS
# This version of the code that reads files is increased when a change of the code makes the same
# files yield other texts or rows.
READING = 2
# This seed determines the sample of text that a tokenizer is trained on.
SEED = 0
NAMED = 3  # `describe_splits` returns this number of document names for each split.

_KIND = {
    "key": str,
    "sources": {str: [{"name": str, "bytes": int, "sha256": str}]},
    "splits": [str],
    "held_out?": {str: str},
    "quarantined?": int,
    "tokenizer?": {"file": str, "name": str},
    "vocabulary?": {"file": str},
}
# This type stands for all sections of the config that describe data. They have the fields train,
# validation, test and cache_dir.
Section = Any
Hashes = Mapping[str, Sequence[FileHash]]


def prepared(
    section: Section,
    hashes: Hashes,
    build: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]],
    output: Path | str | None = None,
    **more: Any,
) -> Path:
    """Returns the directory of the prepared data of a config section; prepares them if necessary.

    Args:
      hashes: hashes of the files of each split. They are a part of the directory's name, so that
        data are prepared again if a file has changed.
      build: function that writes prepared data. Its arguments are the directory to fill and the
        settings and sources that the manifest will have; it returns further entries of the
        manifest.
      output: the directory to write; None selects a directory in the cache, named by a hash. If it
        contains something other than these data, DataError is raised.
      more: further values, as JSON, that determine the content.
    """
    facts = {
        "settings": cached_settings(section),
        "sources": _sources(hashes),
    }
    content = {
        "format": manifests.FORMAT,
        "reading": READING,
        "sources": {split: getattr(section, split) for split in hashes},
        "files": hashes,
        "settings": facts["settings"],
        **more,
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    directory = cache_directory(section) / key[:32] if output is None else Path(output)
    if _occupied(directory):
        manifests.remove_abandoned(directory)
    else:
        where = "Data.cache_dir" if output is None else ""
        with manifests.atomic_directory(directory, setting=where, key=key) as temporary:
            described = build(temporary, facts)
            manifests.write(temporary / MANIFEST, {"key": key, **facts, **described})
    if _existing_key(directory) != key:
        what = "is damaged; delete it" if output is None else (
            "contains something else; delete it or name another directory"
        )  # fmt: skip
        raise DataError(f"{directory} {what}")
    return directory


def prepared_split(
    section: Section,
    split: str,
    part: bool,
    known: Path | None,
    hashes: Callable[[Sequence[str]], Sequence[FileHash]],
    build: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]],
    **more: Any,
) -> Path:
    """Returns the directory that contains one prepared split; prepares the split if necessary.

    Sources of other splits are not read, unless the split is a part of the training documents.
    `hashes` returns the hashes of the files of sources; `build` and `more` are as in `prepared`.

    Args:
      part: True if the split is held out of the documents of Data.train, so that these sources have
        to be read.
      known: a directory in which a run has prepared this split before. It is used again if `part`
        is True, or if the sources are unchanged or cannot be read any more.
    """
    reusable = (
        known if known and (known / MANIFEST).is_file() and (known / split).is_dir() else None
    )
    if reusable and part:
        return reusable
    try:
        # Training data, and splits that are held out of them, depend on all sources of Data.train.
        if part or split == "train":
            split_hashes = {s: hashes(section.train) if s == "train" else [] for s in SPLITS}
        else:
            split_hashes = {split: hashes(getattr(section, split))}
    except DataError:
        if not reusable:
            raise
        return reusable
    if reusable and _sources(split_hashes)[split] == read_manifest(reusable)["sources"][split]:
        return reusable
    return prepared(section, split_hashes, build, only=split, **more)


def print_unread_files(
    section: Section, splits: Sequence[str], left_out: Callable[[str], str], show: bool
) -> None:
    """Prints to stderr which files in the directories of sources are not read, if `show` is True.

    `left_out` returns a sentence about the files of a source that are not read, "" for none.
    """
    for source in dict.fromkeys(name for split in splits for name in getattr(section, split)):
        if line := left_out(source):
            say(line, show)


def describe_splits(
    directory: Path, splits: Mapping[str, Any], unit: str
) -> dict[str, dict[str, Any]]:
    """Returns a JSON description of each split, by the name of the split.

    It contains the number of rows or documents (under the key `unit`), the size in bytes, a few
    names, the hash of the content, a phrase about the way in which the split was held out of the
    training data ("" if it has sources of its own), and the source files, if the directory has a
    manifest.
    """
    manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else {"sources": {}}
    descriptions = {}
    for split, store in splits.items():
        files = manifest["sources"].get(split, [])
        size = getattr(store, "manifest", {}).get("bytes") or sum(file["bytes"] for file in files)
        descriptions[split] = {
            unit: len(store),
            **({"bytes": size} if size else {}),
            "names": list(getattr(store, "names", ())[:NAMED]),
            "sha256": store.fingerprint,
            "held_out": manifest.get("held_out", {}).get(split, ""),
            "sources": files,
        }
    return descriptions


def cache_directory(section: Section) -> Path:
    """Returns the setting `cache_dir` or, if that is empty, brt's directory in the user's cache."""
    if section.cache_dir:
        return Path(section.cache_dir)
    return user_cache.writable()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a directory of prepared data, or raises DataError about damage."""
    manifest = manifests.read(directory / MANIFEST, _KIND)
    with manifests.explaining_damage(directory, "corpus"):
        if coverage := manifest.get("tokenizer", {}).get("coverage"):
            untrusted.check(coverage, {"fraction": float}, "coverage")
        if not {*manifest["splits"]} <= {*SPLITS}:
            raise ValueError(f"{MANIFEST} has the splits {', '.join(manifest['splits'])}")
        for name in (
            manifest[kind]["file"] for kind in ("tokenizer", "vocabulary") if kind in manifest
        ):
            if Path(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{MANIFEST} names {name!r}, which is not there")
    return manifest


def _sources(hashes: Hashes) -> dict[str, list[dict[str, Any]]]:
    return {split: [file._asdict() for file in files] for split, files in hashes.items()}


def _occupied(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _existing_key(directory: Path) -> str | None:
    return read_manifest(directory)["key"] if (directory / MANIFEST).exists() else None


def refuse_shared(hashes: Hashes) -> None:
    """Raises DataError if two splits have a file in common, which would make evaluation invalid."""
    seen: dict[str, tuple[str, str]] = {}
    for split, files in hashes.items():
        for file in files:
            other, name = seen.setdefault(file.sha256, (split, file.name))
            if other != split and not file.name.startswith("tfds:"):
                raise DataError(
                    f"{file.name} of Data.{split} has the same content as {name} of "
                    f"Data.{other}; take it out of one of them"
                )


def bar(split: str, progress: bool, **unit: Any) -> tqdm:
    """Returns a progress bar, which is hidden if stderr is not a terminal; `unit` goes to tqdm."""
    hidden = not (progress and sys.stderr.isatty())
    return tqdm(desc=f"preparing {split}", disable=hidden, **unit)


def say(text: str, progress: bool) -> None:
    if progress:
        output.say(text)
