"""Prepared data: once per content, in a cache or where the user says.

What is prepared is a directory with a part for each split, what encodes it (a tokenizer), and
corpus.json, which says what it was made of and is written last.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from brt import untrusted, user_cache
from brt.config.fields import cached_settings
from brt.data import manifests
from brt.data.sources import FileHash
from brt.data.splits import SPLITS
from brt.errors import DataError

MANIFEST = manifests.CORPUS
READING = 2  # how sources are read; another number where the same files become other text or rows
SEED = 0  # of a tokenizer's sample
NAMED = 3  # documents of a split

_KIND = {
    "key": str,
    "sources": {str: [{"name": str, "bytes": int, "sha256": str}]},
    "splits": [str],
    "held_out?": {str: str},
    "quarantined?": int,
    "tokenizer?": {"file": str, "name": str},
    "vocabulary?": {"file": str},
}
Section = Any  # of the config: it has train, validation, test and cache_dir
Hashes = Mapping[str, Sequence[FileHash]]


def prepared(
    section: Section,
    hashes: Hashes,
    build: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]],
    output: Path | str | None = None,
    **more: Any,
) -> Path:
    """The directory of what a section describes; it is made first where that was not done yet.

    Args:
      hashes: of the files of each split, so that a changed file never meets a stale store.
      build: fills the directory that it is given; told settings and sources, it returns what the
        manifest says beside these.
      output: where to write; None: in the cache, under a name made of all that decides the
        content.
      more: decides the content, too.

    Raises:
      DataError: a source cannot be read as asked, or `output` holds something else.
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
    if not _occupied(directory):
        where = f"{type(section).__name__}.cache_dir" if output is None else ""
        with manifests.atomic_directory(directory, setting=where) as temporary:
            described = build(temporary, facts)
            manifests.write(temporary / MANIFEST, {"key": key, **facts, **described})
    if _existing_key(directory) != key:
        what = "is damaged; delete it" if output is None else (
            "holds something else; delete it or name another directory"
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
    """The directory of one split alone: none of the other sources is looked at.

    Args:
      part: it is a part of train, whose sources are read for it.
      known: where a run had it from, of the same section; taken where that is still the same.
      hashes: of the files behind sources.

    Raises:
      DataError: a source cannot be read as asked.
    """
    there = known if known and (known / MANIFEST).is_file() and (known / split).is_dir() else None
    if there and part:
        return there
    try:
        if part or split == "train":  # which depend on the names of all sources
            own = {s: hashes(section.train) if s == "train" else [] for s in SPLITS}
        else:
            own = {split: hashes(getattr(section, split))}
    except DataError:
        if not there:
            raise
        return there
    if there and _sources(own)[split] == read_manifest(there)["sources"][split]:
        return there
    return prepared(section, own, build, only=split, **more)


def say_left_out(
    section: Section, splits: Sequence[str], left_out: Callable[[str], str], show: bool
) -> None:
    """Says which files of directories are not read.

    Args:
      left_out: tells it of a source, in words; "" where there is none.
    """
    for source in dict.fromkeys(name for split in splits for name in getattr(section, split)):
        if line := left_out(source):
            say(line, show)


def described(directory: Path, splits: Mapping[str, Any], unit: str) -> dict[str, dict[str, Any]]:
    """What each split is, as JSON.

    How many of what, bytes of the text or of its files, the first names, content, origin, files; of
    data that nobody prepared only what they say themselves.
    """
    manifest = read_manifest(directory) if (directory / MANIFEST).is_file() else {"sources": {}}
    found = {}
    for split, store in splits.items():
        files = manifest["sources"].get(split, [])
        size = getattr(store, "manifest", {}).get("bytes") or sum(file["bytes"] for file in files)
        found[split] = {
            unit: len(store),
            **({"bytes": size} if size else {}),
            "names": list(getattr(store, "names", ())[:NAMED]),
            "sha256": store.fingerprint,
            "held_out": manifest.get("held_out", {}).get(split, ""),
            "sources": files,
        }
    return found


def cache_directory(section: Section) -> Path:
    """Where corpora are kept that nobody gave a place."""
    if section.cache_dir:
        return untrusted.user_path(section.cache_dir)
    return user_cache.writable()


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a prepared corpus was made of: sources, settings, tokenizer and its coverage.

    Raises:
      DataError: it is missing or damaged, or names files elsewhere.
    """
    found = manifests.read(directory / MANIFEST, _KIND)
    with manifests.undamaged(directory, "corpus"):
        if coverage := found.get("tokenizer", {}).get("coverage"):
            untrusted.check(coverage, {"fraction": float}, "coverage")
        if not {*found["splits"]} <= {*SPLITS}:
            raise ValueError(f"{MANIFEST} has the splits {', '.join(found['splits'])}")
        for name in (found[kind]["file"] for kind in ("tokenizer", "vocabulary") if kind in found):
            if Path(name).name != name or not (directory / name).is_file():
                raise ValueError(f"{MANIFEST} names {name!r}, which is not there")
    return found


def _sources(hashes: Hashes) -> dict[str, list[dict[str, Any]]]:
    return {split: [file._asdict() for file in files] for split, files in hashes.items()}


def _occupied(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))


def _existing_key(directory: Path) -> str | None:
    return read_manifest(directory)["key"] if (directory / MANIFEST).exists() else None


def refuse_shared(hashes: Hashes, section: str) -> None:
    """Raises DataError for a file in two splits, which makes every held-out number wrong."""
    seen: dict[str, tuple[str, str]] = {}
    for split, files in hashes.items():
        for file in files:
            other, name = seen.setdefault(file.sha256, (split, file.name))
            if other != split and not file.name.startswith("tfds:"):
                raise DataError(
                    f"{file.name} of {section}.{split} has the same content as {name} of "
                    f"{section}.{other}; take it out of one of them"
                )


def bar(split: str, progress: bool, **unit: Any) -> tqdm:
    """A bar on a terminal."""
    hidden = not (progress and sys.stderr.isatty())
    return tqdm(desc=f"preparing {split}", disable=hidden, **unit)


def say(text: str, progress: bool) -> None:
    """A line on stderr."""
    if progress:
        print(text, file=sys.stderr, flush=True)
