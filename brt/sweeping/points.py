"""Settings of a sweep. A sweep file is a .gin file that also binds `Sweep`; every setting can vary:

  Sweep.base = 'configs/base/tiny.gin'    # the run that varies, as if included here
  Sweep.points = (
      {'name': 'Slide'},
      {'name': 'Rec', 'include': 'configs/models/rec_fixed_skip.gin', 'Recurrence.states': 16,
       'seeds': (0, 1, 2)},               # replaces the seeds of the grid
  )
  Sweep.grid = {'Model.window': (32, 64), 'Training.seed': (0, 1)}
  Sweep.random = {'Optimizer.learning_rate': ('log_uniform', 1e-4, 1e-2)}
  Sweep.samples = 8
  Sweep.seed = 0                          # the samples depend on nothing else
  Sweep.split = 'validation'              # split on which points are compared
  Sweep.baseline = 'Slide'                # reference of step times; default: the first point

The sweep contains a run for every combination of a named point, a sample and a point of the grid;
any of the three may be missing. Bindings of a point override the file, and the file overrides what
a point includes. Random values are ('uniform' | 'log_uniform' | 'integer', low, high) or
('choice', value, ...). Points that differ only in Training.seed are averaged.
"""

import dataclasses
import hashlib
import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_type_hints

from brt.bindings import Binding, Resolved
from brt.config import Config
from brt.config.checks import converted
from brt.config.kinds import kind_sections
from brt.config.model import PARTS
from brt.config.names import field_types, has_section
from brt.config_io import checked_value, config_values, nearest, suggestion, unknown_name
from brt.errors import ConfigError

SEED = "Training.seed"  # Points of a group differ only in this setting.
# Random numbers have this number of significant digits, because few digits keep names readable.
_SAMPLED_DIGITS = 4
_DISTRIBUTIONS = ("uniform", "log_uniform", "integer", "choice")


class NamedPoint(NamedTuple):
    """A named set of bindings in Sweep.points: `{'name': 'T5', 'include': 't5.gin', ...}`."""

    name: str
    include: tuple[str, ...]  # the paths of the .gin files that the point includes
    bindings: dict[str, Any]  # the values of settings, by `Section.field`
    seeds: tuple[int, ...] = ()  # the values of Training.seed; () for those of the grid

    def grid(self, common: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """Returns the grid of the point, a copy of `common`, which is the grid of the sweep.

        If the point has `seeds`, they replace the values of Training.seed in the copy.
        """
        return {**common, SEED: self.seeds} if self.seeds else dict(common)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of a sweep, whose runs combine named points, random samples and a grid."""

    base: tuple[str, ...] = ()  # the paths of the .gin files that all points include
    points: tuple[NamedPoint, ...] = ()
    # The values of each setting that varies on the grid.
    grid: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # The distribution of each setting that is sampled, such as ("uniform", low, high).
    random: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    samples: int = 0  # the number of random samples; each has a value of every setting in `random`
    seed: int = 0  # the seed of the samples, independent of Training.seed
    split: Literal["train", "validation", "test"] = "validation"  # on which points are compared
    baseline: str = ""  # the point with whose step time others are compared; "" for the first
    # The file and line where each of these fields is bound.
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.points or self.grid or self.random):
            raise ConfigError(
                "the sweep has no points; bind Sweep.grid, Sweep.points or Sweep.random"
            )
        if bool(self.random) != (self.samples > 0):
            raise ConfigError(
                f"Sweep.samples = {self.samples} says how often to draw from Sweep.random, which "
                f"has {len(self.random)} fields; bind both or none"
            )
        for name in self.grid:
            if name in self.random:
                raise ConfigError(f"{name} is in Sweep.grid and in Sweep.random; keep one")
        for point in self.points:
            if point.seeds and SEED in point.bindings:
                raise ConfigError(f"the point {point.name!r} has seeds and {SEED}; keep one")
            for name in point.bindings:
                if name in self.grid or name in self.random:
                    where = "grid" if name in self.grid else "random"
                    raise ConfigError(
                        f"{name} is in Sweep.{where} and in the point {point.name!r}; keep one"
                    )

    def sample(self, index: int) -> dict[str, Any]:
        """Returns the random values of the sample with the number `index`, by setting."""
        # A value depends only on Sweep.seed, the setting, its distribution and the index.
        return {
            name: checked_value(name, _draw(rule, random.Random(f"{self.seed}/{name}/{index}")))
            for name, rule in self.random.items()
        }


def from_bindings(bound: Mapping[str, Binding]) -> Sweep:
    """Returns the sweep; `bound` maps fields of the section `Sweep` to their bindings."""
    values = {}
    types = {name: kind for name, kind in get_type_hints(Sweep).items() if name != "origins"}
    for field, binding in bound.items():
        try:
            if field not in types:
                guess = nearest(field, types)
                hint = f"did you mean 'Sweep.{guess}'?" if guess else f"it has {', '.join(types)}"
                raise ConfigError(f"no field 'Sweep.{field}'; {hint}")
            read = _READERS.get(field, partial(converted, annotation=types[field]))
            values[field] = read(f"Sweep.{field}", value=binding.value)
        except ConfigError as error:
            raise ConfigError(f"{binding.origin}: {error}") from error
    return Sweep(**values, origins={field: binding.origin for field, binding in bound.items()})


def _draw(rule: tuple[Any, ...], source: random.Random) -> Any:
    kind, *arguments = rule
    if kind == "choice":
        return source.choice(arguments)
    low, high = arguments
    if kind == "integer":
        return source.randint(low, high)
    if kind == "log_uniform":
        value = low * (high / low) ** source.random()
    else:
        value = source.uniform(low, high)
    return float(f"{value:.{_SAMPLED_DIGITS}g}")


def _mapping(where: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} = {value!r} must be a dictionary {{'Section.field': ...}}")
    return value


def _sequence(where: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} = {value!r} must be a tuple; write ({value!r},)")
    if not value:
        raise ConfigError(f"{where} = {value!r} is empty; give it values or remove it")
    return tuple(value)


def _grid(where: str, value: Any) -> dict[str, tuple[Any, ...]]:
    return {
        name: tuple(_value(where, name, item) for item in _sequence(f"{where}: {name}", choices))
        for name, choices in _settings(where, _mapping(where, value)).items()
    }


def _settings(where: str, values: Mapping[Any, Any]) -> Mapping[str, Any]:
    """Returns `values` unchanged; raises ConfigError if a key is not the name of a setting."""
    for name in values:
        if not isinstance(name, str) or name not in field_types():
            raise ConfigError(f"{where} has {unknown_name(str(name))}")
    return values


def _value(where: str, name: str, value: Any) -> Any:
    try:
        return checked_value(name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _points(where: str, value: Any) -> tuple[NamedPoint, ...]:
    points = []
    for item in _sequence(where, value):
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
            raise ConfigError(f"{where}: {item!r} must be a dictionary with a 'name' in quotes")
        inside = f"{where}: {item['name']}"
        include = converted(f"{inside}: include", tuple[str, ...], item.get("include", ()))
        others = {k: v for k, v in item.items() if k not in ("name", "include", "seeds")}
        bindings = {k: _value(inside, k, v) for k, v in _settings(inside, others).items()}
        seeds = _grid(inside, {SEED: item["seeds"]})[SEED] if "seeds" in item else ()
        points.append(NamedPoint(item["name"], include, bindings, seeds))
    return tuple(points)


def _random(where: str, value: Any) -> dict[str, tuple[Any, ...]]:
    rules = {}
    for name, rule in _settings(where, _mapping(where, value)).items():
        inside = f"{where}: {name}"
        kind, *values = _sequence(inside, rule)
        if kind not in _DISTRIBUTIONS:
            guess = suggestion(str(kind), _DISTRIBUTIONS)
            raise ConfigError(
                f"{inside} = {rule!r} must begin with one of {', '.join(_DISTRIBUTIONS)}{guess}"
            )
        arguments = tuple(_value(where, name, value) for value in values)
        if kind == "choice":
            _sequence(f"{inside}: choice", arguments)
        else:
            _check_range(inside, name, kind, arguments)
        rules[name] = (kind, *arguments)
    return rules


def _check_range(where: str, name: str, kind: str, arguments: tuple[Any, ...]) -> None:
    wanted = int if kind == "integer" else float
    if field_types()[name] is not wanted:
        raise ConfigError(f"{where}: {kind} draws {wanted.__name__}s, which {name} is not")
    if len(arguments) != 2 or not arguments[0] < arguments[1]:
        raise ConfigError(f"{where}: {kind} needs a lower and a higher bound, not {arguments}")
    if kind == "log_uniform" and arguments[0] <= 0:
        raise ConfigError(f"{where}: log_uniform needs bounds above 0, not {arguments}")


def _count(where: str, value: Any) -> int:
    number: int = converted(where, int, value)
    if number < 0:
        raise ConfigError(f"{where} = {number} must not be negative")
    return number


_READERS: Mapping[str, Callable[..., Any]] = {
    "points": _points, "grid": _grid, "random": _random, "samples": _count, "seed": _count,
}  # fmt: skip

# A point may not have one of these names, because the sweep writes other files to directories with
# these names.
RESERVED = ("plots", "slurm")
MOST = 10_000  # A sweep may have at most this many points.
_LONGEST = 96  # The name of a directory has at most this many characters.
_HASH = 8

Resolve = Callable[[Sequence[Binding], Sequence[str]], Resolved]


class Point(NamedTuple):
    """One run of a sweep, which combines a named point (a set of bindings that the sweep file
    names), a random sample of some settings, and a combination of values from the grid.
    """

    number: int  # the index of the point in the sweep, from 0
    name: str  # the name for people, which contains the values that distinguish the point
    # The name of the point's directory. It is `name` with replacements for characters that some
    # file systems or shells do not accept.
    directory: str
    group: str  # `name` without the seed; points that differ only in the seed have the same group
    bindings: dict[str, Any]  # all settings that differ between points, by `Section.field`
    resolved: Resolved  # the config, with the origin of each value

    @property
    def config(self) -> Config:
        return self.resolved.config


def expand(sweep: Sweep, resolve: Resolve) -> list[Point]:
    """Returns every point of a sweep.

    The points are ordered by the named point, then by the sample, then by the values of the grid.
    `resolve` returns the config of a run; its arguments are bindings, which override all others,
    and the paths of .gin files to include.

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
            field: f"{short[field]}={_shown(value)}" for field, value in (sample | cell).items()
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
    """Returns the points that this process runs: the point `index`, or all if it is None."""
    if index is None:
        return list(points)
    if not 0 <= index < len(points):
        raise ConfigError(
            f"--array_index={index} is no point of this sweep, which has 0 to {len(points) - 1}"
        )
    return [points[index]]


def listing(points: Iterable[Point]) -> str:
    """Returns a line for each point: its index, its directory, and its `bindings`."""
    points = list(points)
    width = max(len(point.directory) for point in points)
    return "\n".join(
        f"{point.number:>4}  {point.directory:<{width}}  "
        + ", ".join(f"{name} = {value!r}" for name, value in point.bindings.items())
        for point in points
    )


def _with_bindings(points: Sequence[Point]) -> list[Point]:
    """Returns the points with `bindings`: the settings that are not the same in all points."""
    # If the model of a point does not use a section, such as that of a kind of layer, the settings
    # of this section are left out, except its `layers` (the indices of layers of this kind).
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
    """Returns a short name for each setting: without the section, unless two would be equal."""
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


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_shown, value)) or "none"
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
