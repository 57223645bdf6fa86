"""Determines the names, directories and configs of all points of a sweep before the first run.

A point is one run of the sweep. It combines a named point (a set of bindings that the sweep file
names), a random sample of some settings, and a combination of values from the grid.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brt.bindings import Binding, Resolved
from brt.config import Config
from brt.config.kinds import kind_sections
from brt.config.model import PARTS
from brt.config.names import field_types, has_section
from brt.config_io import config_values, suggestion
from brt.errors import ConfigError
from brt.sweeping.settings import SEED, NamedPoint, Sweep

# A point may not have one of these names, because the sweep writes other files to directories with
# these names.
RESERVED = ("plots", "slurm")
MOST = 10_000  # A sweep may have at most this many points.
_LONGEST = 96  # The name of a directory has at most this many characters.
_HASH = 8

Resolve = Callable[[Sequence[Binding], Sequence[str]], Resolved]


class Point(NamedTuple):
    """One run of a sweep."""

    number: int  # the index of the point in the sweep, from 0
    name: str  # the name for people, which contains the values that distinguish the point
    # The name of the point's directory: `name`, in which characters that some file systems or
    # shells do not accept are replaced.
    directory: str
    group: str  # the name without the seed, which points that differ only in the seed share
    bindings: dict[str, Any]  # all settings that differ between points, by `Section.field`
    resolved: Resolved  # the config, with the origin of each value

    @property
    def config(self) -> Config:
        return self.resolved.config


def expand(sweep: Sweep, resolve: Resolve) -> list[Point]:
    """Returns every point of a sweep.

    In the order of the points, the values from the grid change first, then the random sample, then
    the named point. `resolve` returns the config of a run; its arguments are bindings, which
    override all others, and the paths of .gin files to include.

    Raises:
      ConfigError: the config of a point is invalid, two points are equal or share a directory, or
        the baseline is not a point.
    """
    named = sweep.points or (NamedPoint("", (), {}),)
    cells = sum(math.prod(map(len, point.grid(sweep.grid).values())) for point in named)
    if (count := cells * max(sweep.samples, 1)) > MOST:
        raise ConfigError(f"the sweep has {count:,} points, more than {MOST:,}; vary less at once")
    samples = [sweep.sample(i) for i in range(sweep.samples)] or [{}]
    short = _short_names(dict.fromkeys([*sweep.random, *sweep.grid, SEED]))
    points = []
    for point, sample, cell in _cells(named, samples, sweep.grid):
        name, include, point_bindings, _ = point
        if not name.isprintable():
            raise ConfigError(f"point {name!r} has characters that cannot be printed; rename it")
        parts = {
            field: f"{short[field]}={_text(value)}" for field, value in (sample | cell).items()
        }
        full = ",".join(filter(None, [name, *parts.values()]))
        group = ",".join(filter(None, [name, *(p for f, p in parts.items() if f != SEED)]))
        sources = dict.fromkeys(cell, "grid") | dict.fromkeys(sample, "random")
        sources |= dict.fromkeys([*point_bindings, *([SEED] if point.seeds else [])], "points")
        more = [
            Binding(field, value, sweep.origins[sources[field]])
            for field, value in {**point_bindings, **sample, **cell}.items()
        ]
        try:
            resolved = resolve(more, [*sweep.base, *include])
        except ConfigError as error:
            raise ConfigError(f"point {full}: {error}") from error
        points.append(Point(len(points), full, _directory(full), group or "all", {}, resolved))
    _check_distinct(points)
    _check_baseline(sweep.baseline, points)
    return _with_bindings(points)


def _cells(
    named: Iterable[NamedPoint],
    samples: Iterable[dict[str, Any]],
    grid: Mapping[str, tuple[Any, ...]],
) -> Iterator[tuple[NamedPoint, dict[str, Any], dict[str, Any]]]:
    """Yields (named point, sample, values of the grid) in the order of the points."""
    for point, sample in itertools.product(named, samples):
        point_grid = point.grid(grid)
        for values in itertools.product(*point_grid.values()):
            yield point, sample, dict(zip(point_grid, values, strict=True))


def choose(points: Sequence[Point], index: int | None) -> list[Point]:
    """Returns the points that this process runs: the one of --array_index, or all if it is None."""
    if index is None:
        return list(points)
    if not 0 <= index < len(points):
        raise ConfigError(
            f"--array_index={index} is no point of this sweep, which has 0 to {len(points) - 1}"
        )
    return [points[index]]


def listing(points: Iterable[Point]) -> str:
    """Returns a line for each point: its index, its directory, and the settings that differ."""
    points = list(points)
    width = max(len(point.directory) for point in points)
    return "\n".join(
        f"{point.number:>4}  {point.directory:<{width}}  "
        + ", ".join(f"{name} = {value!r}" for name, value in point.bindings.items())
        for point in points
    )


def _with_bindings(points: Sequence[Point]) -> list[Point]:
    """Adds to each point the settings that are not the same in all points."""
    # Settings of kinds of layers that a point does not have are left out, except the settings that
    # place the layers.
    values = [
        {name: v for name, v in config_values(p.config).items() if _counts(p.config, name)}
        for p in points
    ]
    names = dict.fromkeys(name for own in values for name in own)
    varied = [name for name in names if len({own[name] for own in values if name in own}) > 1]
    return [
        point._replace(bindings={name: own[name] for name in varied if name in own})
        for point, own in zip(points, values, strict=True)
    ]


def _counts(config: Config, name: str) -> bool:
    return name.endswith("layers") or has_section(config, name.partition(".")[0])


def _short_names(fields: Iterable[str]) -> dict[str, str]:
    """Returns short names of settings; those that stay distinct without the section lack it."""
    fields = list(fields)
    tails = [_tail(field) for field in fields]
    return {f: t if tails.count(t) == 1 else f for f, t in zip(fields, tails, strict=True)}


def _tail(name: str) -> str:
    section, _, field = name.partition(".")
    kind = kind_sections().get(section)
    if kind and field == "layers":
        return f"{kind.kind}_{field}"
    if section in PARTS and sum(other.endswith(f".{field}") for other in field_types()) > 1:
        return f"{re.sub('(?<=[a-z])(?=[A-Z])', '_', section).lower()}_{field}"  # mlp_bias
    return field


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_text, value)) or "none"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return repr(value)[1:-1] if isinstance(value, str) else str(value)


def _directory(name: str) -> str:
    """Returns a name that is safe in file systems and shells; long names are cut and get a hash."""
    safe = re.sub(r"[^A-Za-z0-9._=,+-]+", "-", name).strip("-.") or "point"
    if len(safe) <= _LONGEST:
        return safe
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH]
    return f"{safe[: _LONGEST - _HASH - 1]}-{digest}"


def _check_distinct(points: Iterable[Point]) -> None:
    directories: dict[str, Point] = {}
    configs: dict[Config, Point] = {}
    for point in points:
        if point.directory.lower() in RESERVED:
            raise ConfigError(f"a point cannot be named {point.name!r}; choose another name")
        other = directories.setdefault(point.directory.lower(), point)
        if other is not point:
            raise ConfigError(
                f"two points are named {point.name!r}; give them other names"
                if other.name == point.name
                else f"the points {other.name!r} and {point.name!r} would share the directory "
                f"{point.directory}; give them other names"
            )
        other = configs.setdefault(point.config, point)
        if other is not point:
            raise ConfigError(
                f"the points {other.name!r} and {point.name!r} are the same run; remove one"
            )


def _check_baseline(baseline: str, points: Sequence[Point]) -> None:
    known = {point.group for point in points} | {point.name for point in points}
    if baseline and not any(f"{name},".startswith(f"{baseline},") for name in known):
        guess = suggestion(baseline, known) or f"; the first is {points[0].group!r}"
        raise ConfigError(f"Sweep.baseline = {baseline!r} is no point{guess}")
