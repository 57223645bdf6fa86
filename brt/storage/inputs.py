"""Copies documents and tokenizers from buckets and from the Hugging Face Hub."""

import os
import re
from collections.abc import Collection
from fnmatch import translate
from glob import has_magic

from brt import formatting
from brt.errors import DataError
from brt.storage import hub, mirror, places


def matching(name: str) -> str:
    """Returns the local path, or the local pattern, that the name of a source stands for.

    Files in a bucket or on the hub that match the name are copied. Other names are returned as
    `places.parse` returns them.
    """
    place = places.parse(name, hub=True)
    if isinstance(place, str):
        return place
    if place.scheme == "hf":
        return _on_hub(place)
    if not has_magic(place.key):
        if not os.path.exists(path := mirror.readable(name)):
            raise _nothing(place)
        return path
    parts = place.key.split("/")
    fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    copy = mirror.opened(place._replace(key="/".join(parts[:fixed])))
    pattern = "/".join(parts[fixed:])
    prefix = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    if not copy.fetch_matching(_regular_expression(pattern), prefix):
        raise _nothing(place)
    return str(copy.path / pattern)


def _nothing(place: places.Place) -> DataError:
    # For gs://, a list that is refused looks like an empty list. The message therefore speaks of
    # permission.
    return DataError(
        f"{place} names nothing that the credentials of this machine have permission to list"
    )


def tokenizer(name: str, beside: Collection[str]) -> str:
    """Returns the local path of the file of a tokenizer; the files `beside` it are copied, too."""
    place = places.parse(name)
    if isinstance(place, str):
        return place
    parent, _, last = place.key.rpartition("/")
    copy = mirror.opened(place._replace(key=parent))
    names = "|".join(map(re.escape, (last, *beside)))
    copy.fetch_matching(re.compile(rf"{names}|additional_chat_templates/[^/]+\.jinja"))
    return str(copy.path / last)


def _on_hub(place: places.Place) -> str:
    """Fetches hf://datasets/OWNER/NAME[@REVISION]/PATTERN; returns the local path or pattern."""
    kind, _, rest = place.key.partition("/")
    owner, _, rest = rest.partition("/")
    name, _, pattern = rest.partition("/")
    if kind != "datasets" or not name:
        raise DataError(f"{place} names no data set; write hf://datasets/OWNER/NAME/FILES")
    name, _, revision = name.partition("@")
    patterns = [pattern] if has_magic(pattern) else [pattern, f"{pattern}/*"] if pattern else ["*"]
    path = hub.fetch(str(place), f"{owner}/{name}", revision or None, patterns, kind="dataset")
    formatting.SHOWN[str(path)] = str(place._replace(key=f"{kind}/{owner}/{name}"))
    return str(path / pattern) if pattern else str(path)


def _regular_expression(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern; ** stands for any number of directories."""
    parts = [
        "(?:[^/]+/)*" if part == "**" else translate(part).replace(".*", "[^/]*") + "/"
        for part in pattern.split("/")
    ]
    joined = "".join(parts).replace(r"\Z", "").replace(r"\z", "").removesuffix("/")
    return re.compile(joined, re.DOTALL)
