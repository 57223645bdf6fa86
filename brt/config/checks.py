"""Functions with which config sections check their own fields.

If a check fails, the function raises a ConfigError that names the setting and its value.
"""

import dataclasses
import math
from typing import Any

from brt import places
from brt.config.fields import fill_held_out, settings
from brt.config.shared import public_name
from brt.errors import ConfigError

PART = "part:"  # The source 'part:0.05' of a split stands for 5 % of the training rows.
LARGEST = 2**31 - 1  # Counts in settings are at most this number, because indices are int32.
MAX_LAYERS = 1024  # Models have at most this number of layers. Compiling more would take hours.


def check(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def name_of(section: object, field: str) -> str:
    """Returns the name that a field of a section has in .gin files.

    A section may have another name in .gin files than its class: users write "Data.train" for the
    field `train` of the class `Pairs`, because each task has its own class for the section `Data`.
    """
    return public_name(f"{type(section).__name__}.{field}")


def check_finite(section: Any) -> None:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{name_of(section, field.name)} = {value} must be finite")


def settle_paths(section: Any) -> None:
    """Replaces the names of files and directories in a section by local paths; see `brt.places`."""
    for field, setting in settings(type(section)).items():
        if setting.path:
            value, asked = getattr(section, field), name_of(section, field)
            many = isinstance(value, tuple)
            paths = tuple(places.local(name, asked) for name in (value if many else (value,)))
            object.__setattr__(section, field, paths if many else paths[0])


def check_positive(section: object, *names: str) -> None:
    """Refuses fields that are not above 0, or are integers that exceed an int32."""
    for name in names:
        value = getattr(section, name)
        if not value > 0:
            raise ConfigError(f"{name_of(section, name)} = {value} must be above 0")
        _check_counts(section, name)


def check_not_negative(section: object, *names: str) -> None:
    """Refuses fields that are negative, or are integers that exceed an int32."""
    for name in names:
        value = getattr(section, name)
        if not value >= 0:
            raise ConfigError(f"{name_of(section, name)} = {value} must not be negative")
        _check_counts(section, name)


def check_items(section: object, name: str, known: tuple[str, ...]) -> None:
    """Refuses a tuple with items that are not in `known`, and brings the items into its order.

    Sections in which users wrote the same items in another order are then equal.
    """
    value = getattr(section, name)
    unknown = [item for item in value if item not in known]
    check(
        not unknown,
        f"{name_of(section, name)} = {value} must consist of items from "
        f"{', '.join(map(repr, known))}",
    )
    object.__setattr__(section, name, tuple(item for item in known if item in value))


def check_layers(section: object, *names: str) -> None:
    """Refuses numbers of layers that are below 1 or exceed `MAX_LAYERS`."""
    check_positive(section, *names)
    for name in names:
        value = getattr(section, name)
        if value > MAX_LAYERS:
            raise ConfigError(f"{name_of(section, name)} = {value} must be at most {MAX_LAYERS:,}")


def _check_counts(section: object, name: str) -> None:
    value = getattr(section, name)
    if not isinstance(value, float) and value > LARGEST:
        raise ConfigError(f"{name_of(section, name)} = {value} must be at most {LARGEST}")


def check_buckets(section: Any) -> None:
    """Refuses buckets (padded lengths) unless they ascend from above 0 to `max_length`."""
    buckets, limit = section.buckets, section.max_length
    check(
        not buckets or (min(buckets) > 0 and list(buckets) == sorted({*buckets})),
        f"Data.buckets = {buckets} must ascend and be above 0",
    )
    check(
        not buckets or buckets[-1] == limit,
        f"the last of Data.buckets = {buckets} must be Data.max_length = {limit}",
    )


def fill_held_out_rows(section: Any) -> None:
    """Sets and checks the sources of the validation and the test split of a section.

    If the user named training rows but no rows for a split, the split becomes 5 % of the training
    rows. If the training rows are the default or generated, the split has the default sources that
    the section declares.
    """
    fill_held_out(section, (f"{PART}0.05",))
    for split in ("validation", "test"):
        share_of(section, split)


def share_of(section: Any, split: str) -> float:
    """Returns the share of the training rows that a split holds out, or 0.0 if it names sources.

    The value of the section's field `split` is ("part:SHARE",) or names sources.
    """
    names = getattr(section, split)
    if not any(name.startswith(PART) for name in names):
        return 0.0
    try:
        (share,) = (float(name.removeprefix(PART)) for name in names)
    except ValueError:
        share = 0.0
    setting = f"{name_of(section, split)} = {names}"
    check(0 < share < 0.5, f"{setting} must be one {PART}SHARE from 0 to 0.5, such as {PART}0.05")
    return share
