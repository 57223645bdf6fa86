"""Converts entries of config.json that correspond to exactly one setting of brt, and names of
modules that correspond to exactly one module of brt. The conversions of T5, BART, RoBERTa and
decoders use these functions.
"""

from collections.abc import Mapping
from typing import Any

from brt.config_io import checked_field
from brt.errors import CheckpointError, ConfigError

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def array_names(modules: Mapping[str, str]) -> dict[str, str]:
    """Returns a table that maps brt's names of parameters to Hugging Face's names of arrays.
    `modules` maps brt's names of the modules to Hugging Face's names.
    """
    return {
        f"{ours}/{leaf}": f"{theirs}.{suffix}"
        for ours, theirs in modules.items()
        for leaf, suffix in _LEAVES.items()
    }


def convert_fields(
    table: Mapping[str, str], config: Mapping[str, Any], section: str = ""
) -> dict[str, Any]:
    """Returns the values of settings, by brt's names, from the content of config.json. `table` maps
    each name to its key in config.json. A name is "Model.layers", for example, or only "layers" if
    `section` is "Model.".
    """
    values = {}
    for ours, theirs in table.items():
        if config.get(theirs) is None:
            raise CheckpointError(f"config.json has no {theirs!r}")
        try:
            values[ours] = checked_field(section + ours, config[theirs])
        except ConfigError as error:
            raise CheckpointError(f"config.json: {theirs} cannot be used: {error}") from error
    return values
