"""What sections check themselves with; each raises ConfigError."""

from typing import Any

from brt.errors import ConfigError


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def check_positive(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        check(value > 0, f"{type(section).__name__}.{name} = {value} must be above 0")


def check_not_negative(section: object, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        check(value >= 0, f"{type(section).__name__}.{name} = {value} must not be negative")


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
