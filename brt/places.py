"""Names of files and directories, as users write them in flags, settings and Python.

Every name passes through `local` before anything is read or written, so this is the one place that
decides what a name may be.
"""

import os
import re

from brt.errors import ConfigError
from brt.redaction import redacted

# Path("gs://bucket") is "gs:/bucket", so one slash is enough. Sources such as tfds:NAME/SPLIT have
# none behind the colon.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local(name: str | os.PathLike[str], asked: str = "") -> str:
    """Returns the name of a local file or directory, with ~ expanded as the shell does.

    Names of other kinds, such as tfds:NAME/SPLIT, are returned unchanged. URLs are refused; the
    error names the setting or argument `asked`.
    """
    text, where = os.fspath(name), f"{asked}: " if asked else ""
    if _URL.match(text):
        raise ConfigError(
            f"{where}{redacted(text)!r} is a URL, and brt reads and writes only local files; copy "
            "or mount them, and name their path (write ./ before a local name of this form)"
        )
    path = text if "\0" in text else os.path.expanduser(text)
    if path.partition("/")[0] == "~":
        raise ConfigError(f"{where}{text!r} needs a home directory; name the whole path")
    return path
