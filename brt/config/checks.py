"""What sections check themselves with; each raises ConfigError."""

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
