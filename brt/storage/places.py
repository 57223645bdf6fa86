"""Names of places as users write them: local paths, and URLs of buckets.

gs://BUCKET/KEY and s3://BUCKET/KEY name what lies in a bucket, hf://datasets/OWNER/NAME/FILES names
data of the Hugging Face Hub, and file:///PATH names a local path. In local paths, ~ and $VARIABLES
are expanded as the shell does.
"""

import os
import re
import unicodedata
from typing import NamedTuple
from urllib.parse import unquote

from brt.errors import ConfigError
from brt.redaction import redacted

BUCKETS = {"gs": "gcs", "s3": "s3"}  # TensorStore's drivers, by the scheme of a URL
# Path("gs://bucket") is "gs:/bucket", so one slash is enough. Sources such as tfds:NAME/SPLIT have
# no slash behind the colon.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_SLASHLESS = re.compile(r"\s*(gs|s3|file):", re.IGNORECASE)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_LONGEST_PART = 200  # bytes; file systems allow 255, and brt appends to names
_LONGEST_KEY = 1024  # bytes, the limit of both services


class Place(NamedTuple):
    """What a URL names in a bucket: an object, or all objects whose keys begin with `key`/."""

    scheme: str
    bucket: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(filter(None, (self.bucket, self.key)))}"


def parse(
    name: str | os.PathLike[str], asked: str = "", *, hub: bool = False, saved: bool = False
) -> Place | str:
    """Returns a `Place` if a name stands for something in a bucket, and else a local path.

    With `hub`, the place may also be on the Hugging Face Hub. Names of other kinds, such as
    tfds:NAME/SPLIT, count as paths. Other URLs and impossible names raise ConfigError, whose
    message begins with `asked`, the name of a setting or argument. With `saved`, no $VARIABLE is
    expanded, because the name may come from somebody else's run.
    """
    text, where = os.fspath(name), f"{asked}: " if asked else ""
    if not _URL.match(text):
        text = _expanded(text if saved else os.path.expandvars(text), where)
    match = _URL.match(text)
    if not match:
        if _SLASHLESS.match(text):
            raise ConfigError(
                f"{where}{text!r} lacks the slashes of a URL; write gs://BUCKET/NAME, "
                "s3://BUCKET/NAME, or ./ before a local name"
            )
        return text
    scheme, rest, shown = match[1].lower(), match[2], redacted(text)
    if scheme == "file":
        return _local_path(text, where)
    if scheme == "hf" and hub:
        return Place(scheme, "", rest.strip("/"))
    if scheme not in BUCKETS:
        raise ConfigError(
            f"{where}{shown!r} is a URL of a kind that brt does not read here; name a "
            "path, gs://BUCKET/NAME or s3://BUCKET/NAME (write ./ before a local name of this form)"
        )
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{where}{shown!r}: there is no name of a bucket behind {scheme}:// (3 to 222 small "
            "letters, digits, dots, hyphens)"
        )
    key = key.rstrip("/")
    if problem := key and key_problem(key):
        raise ConfigError(f"{where}{shown!r}: the name {problem}")
    return Place(scheme, bucket, key)


def settled(name: str, asked: str = "") -> str:
    """Returns a name as it is kept in a config: a local path, or the URL of a place in a bucket."""
    return str(parse(name, asked, saved=True))


def source(name: str, asked: str = "") -> str:
    """Returns what `settled` returns, but also accepts data on the hub."""
    return str(parse(name, asked, hub=True, saved=True))


def local_only(name: str, asked: str = "") -> str:
    """Returns a local path; raises ConfigError for a place in a bucket."""
    place = parse(name, asked, saved=True)
    if isinstance(place, Place):
        where = f"{asked}: " if asked else ""
        raise ConfigError(f"{where}{place} is in a bucket, and this must be a local path")
    return place


def key_problem(key: str) -> str:
    """Returns why the key of an object cannot be the path of a file; "" if it can."""
    if len(key.encode("utf-8", "replace")) > _LONGEST_KEY:
        return f"is longer than {_LONGEST_KEY} bytes"
    if any(part in ("", ".", "..") for part in key.split("/")):
        return "has an empty part, or . or .. as one"
    if max(len(part.encode("utf-8", "replace")) for part in key.split("/")) > _LONGEST_PART:
        return f"has a part of more than {_LONGEST_PART} bytes"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in key):
        return "has control characters"
    return ""


def _local_path(url: str, where: str) -> str:
    path = url.partition(":")[2]
    if path.startswith("//"):
        host, slash, path = path[2:].partition("/")
        if host not in ("", "localhost") or not path:
            raise ConfigError(
                f"{where}{url!r} names no file of this machine; write file:///PATH, or the path"
            )
        path = slash + path
    return unquote(path)


def _expanded(text: str, where: str) -> str:
    path = text if "\0" in text else os.path.expanduser(text)
    if path.partition("/")[0] == "~":
        raise ConfigError(f"{where}{text!r} needs a home directory; name the whole path")
    return path
