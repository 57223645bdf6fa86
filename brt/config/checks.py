"""What sections check themselves with; each raises ConfigError."""

import dataclasses
import math
from typing import Any

from brt.config.fields import settle
from brt.errors import ConfigError

PART = "part:"  # of train's rows
LARGEST = 2**31 - 1  # of a count: indices and steps are int32
DEEPEST = 1024  # layers, of which more would compile for hours


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_finite(section: Any) -> None:
    """Every number of a section, whichever way it came in."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            check(
                not isinstance(number, float) or math.isfinite(number),
                f"{type(section).__name__}.{field.name} = {value} must be finite",
            )


def check_positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        check(value > 0, f"{type(section).__name__}.{name} = {value} must be above 0")
        _check_counts(section, name)


def check_not_negative(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        check(value >= 0, f"{type(section).__name__}.{name} = {value} must not be negative")
        _check_counts(section, name)


def check_layers(section: object, *names: str) -> None:
    """How many there are."""
    check_positive(section, *names)
    for name in names:
        value = getattr(section, name)
        where = f"{type(section).__name__}.{name}"
        check(value <= DEEPEST, f"{where} = {value} must be at most {DEEPEST:,}")


def _check_counts(section: object, name: str) -> None:
    value = getattr(section, name)
    where = f"{type(section).__name__}.{name}"
    check(
        isinstance(value, float) or value <= LARGEST, f"{where} = {value} must be at most {LARGEST}"
    )


def check_buckets(section: Any) -> None:
    buckets, limit = section.buckets, section.max_length
    name = type(section).__name__
    check(
        not buckets or (min(buckets) > 0 and list(buckets) == sorted({*buckets})),
        f"{name}.buckets = {buckets} must ascend and be above 0",
    )
    check(
        not buckets or buckets[-1] == limit,
        f"the last of {name}.buckets = {buckets} must be {name}.max_length = {limit}",
    )


def settle_rows(section: Any) -> None:
    """Held-out rows that nobody named are a part of one's own; refuses parts that are none."""
    settle(section, (f"{PART}0.05",))
    for split in ("validation", "test"):
        share_of(section, split)


def share_of(section: Any, split: str) -> float:
    """Of train's rows that a split takes: SHARE of `part:SHARE`; 0.0 where it names sources.

    Raises:
      ConfigError: it names sources beside that, or the share is none.
    """
    names = getattr(section, split)
    if not any(name.startswith(PART) for name in names):
        return 0.0
    try:
        (share,) = (float(name.removeprefix(PART)) for name in names)
    except ValueError:
        share = 0.0
    setting = f"{type(section).__name__}.{split} = {names}"
    check(0 < share < 0.5, f"{setting} must be one {PART}SHARE between 0 and 0.5, as {PART}0.05")
    return share
