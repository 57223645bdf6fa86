"""What the conversions of T5, BART, RoBERTa and decoders have in common: entries of config.json
that are one setting in brt, and modules that are one module in brt.
"""

from collections.abc import Mapping
from typing import Any

from brt.config_io import checked_field
from brt.errors import CheckpointError, ConfigError

_LEAVES = {"kernel": "weight", "embedding": "weight", "scale": "weight", "bias": "bias"}


def array_names(modules: Mapping[str, str]) -> dict[str, str]:
    """Returns Hugging Face's names of the arrays of modules by brt's names; `modules` has Hugging
    Face's name of each module by brt's name.
    """
    return {
        f"{ours}/{leaf}": f"{theirs}.{suffix}"
        for ours, theirs in modules.items()
        for leaf, suffix in _LEAVES.items()
    }


def convert_fields(
    table: Mapping[str, str], config: Mapping[str, Any], section: str = ""
) -> dict[str, Any]:
    """Returns settings with values from the content of config.json. `table` has the key of each
    setting by brt's name, such as "Model.layers" or, with the `section` "Model.", "layers".
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
