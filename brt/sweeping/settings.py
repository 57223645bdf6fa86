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
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from brt.bindings import Binding
from brt.config.names import field_types
from brt.config_io import checked_value, nearest, suggestion, unknown_name
from brt.errors import ConfigError

SEED = "Training.seed"  # Points of a group differ only in this setting.
# Random numbers have this number of significant digits, because few digits keep names readable.
_SAMPLED_DIGITS = 4
_SPLITS = ("train", "validation", "test")
_DISTRIBUTIONS = ("uniform", "log_uniform", "integer", "choice")


class NamedPoint(NamedTuple):
    """Named bindings: `{'name': 'T5', 'include': 'base/t5.gin', 'Training.epochs': 2.0}`."""

    name: str
    include: tuple[str, ...]  # the paths of the .gin files that the point includes
    bindings: dict[str, Any]  # the values of settings, by `Section.field`
    seeds: tuple[int, ...] = ()  # the values of Training.seed; () for those of the grid

    def grid(self, common: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
        """Returns the grid of the sweep, in which `seeds` replace the values of Training.seed."""
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
    split: str = "validation"  # on which points are compared
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
        """Returns the random values of the sample number `index`, by setting."""
        # A value depends only on Sweep.seed, the setting, its distribution and the index.
        return {
            name: checked_value(name, _draw(rule, random.Random(f"{self.seed}/{name}/{index}")))
            for name, rule in self.random.items()
        }


def from_bindings(bound: Mapping[str, Binding]) -> Sweep:
    """Returns the sweep that the bindings of the section `Sweep`, by field, describe."""
    values = {}
    for field, binding in bound.items():
        try:
            if field not in _CHECKS:
                guess = nearest(field, _CHECKS)
                hint = f"did you mean 'Sweep.{guess}'?" if guess else f"it has {', '.join(_CHECKS)}"
                raise ConfigError(f"no field 'Sweep.{field}'; {hint}")
            values[field] = _CHECKS[field](f"Sweep.{field}", binding.value)
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


def _known(where: str, name: Any) -> str:
    if not isinstance(name, str) or name not in field_types():
        raise ConfigError(f"{where} has {unknown_name(str(name))}")
    return name


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
    grid = {}
    for name, choices in _mapping(where, value).items():
        name = _known(where, name)
        values = _sequence(f"{where}: {name}", choices)
        grid[name] = tuple(_value(where, name, item) for item in values)
    return grid


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
        include = item.get("include", ())
        bindings = {
            _known(inside, name): _value(inside, _known(inside, name), setting)
            for name, setting in item.items()
            if name not in ("name", "include", "seeds")
        }
        seeds = _grid(inside, {SEED: item["seeds"]})[SEED] if "seeds" in item else ()
        files = _files(f"{inside}: include", include)
        points.append(NamedPoint(item["name"], files, bindings, seeds))
    return tuple(points)


def _random(where: str, value: Any) -> dict[str, tuple[Any, ...]]:
    rules = {}
    for name, rule in _mapping(where, value).items():
        name = _known(where, name)
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


def _files(where: str, value: Any) -> tuple[str, ...]:
    files = (value,) if isinstance(value, str) else value
    if not isinstance(files, list | tuple) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{where} = {value!r} must be the path of a .gin file, or a tuple of them"
        )
    return tuple(files)


def _count(where: str, value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ConfigError(f"{where} = {value!r} must be an int that is not negative")
    return value


def _split(where: str, value: Any) -> str:
    if value not in _SPLITS:
        raise ConfigError(f"{where} = {value!r} must be one of {', '.join(map(repr, _SPLITS))}")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} = {value!r} must be the name of a point in quotes")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "base": _files,
    "points": _points,
    "grid": _grid,
    "random": _random,
    "samples": _count,
    "seed": _count,
    "split": _split,
    "baseline": _text,
}
