"""Patterns of parameter paths, such as "*/cell/*", by which settings choose parameters of a model.

The patterns are those of the module `fnmatch`. A parameter's path has the names on the way to the
parameter in the tree of parameters, joined by "/".
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from brt.config.checks import nearest
from brt.errors import ConfigError

_SHOWN = 6  # An error lists at most this number of parameters.


def matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def check(setting: str, patterns: Sequence[str], paths: Collection[str], kind: str) -> None:
    """Raises ConfigError if a pattern of a setting matches no path of a parameter."""
    for pattern in patterns:
        if any(matches(path, [pattern]) for path in paths):
            continue
        shown = _near(pattern.replace("*", "").strip("/"), paths) or list(paths)
        listed = ", ".join(shown[:_SHOWN]) + (", ..." if len(shown) > _SHOWN else "")
        raise ConfigError(
            f"{setting} has {pattern!r}, which matches none of the {len(paths)} {kind}; there are "
            f"{listed} (without {setting}, brt.train --dry_run lists all)"
        )


def _near(name: str, paths: Collection[str]) -> list[str]:
    """Returns the paths that have a part which is similar to `name`."""
    parts: dict[str, list[str]] = {}
    for path in paths:
        names = path.split("/")
        for start in range(len(names)):
            for end in range(start + 1, len(names) + 1):
                parts.setdefault("/".join(names[start:end]), []).append(path)
    near = nearest(name, parts)
    return parts[near] if near else [path for path in paths if name and name in path]
