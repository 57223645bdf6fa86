"""Functions that return configs, and models with their kinds of layers, with changed settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import brt.models as models  # registers the kinds of layers
from brt.config import Config, Model
from brt.config.kinds import kind_sections
from brt.config.model import PARTS

__all__ = ["PARITY", "changed", "with_settings", "models"]
# The arithmetic of google-research/meliad, the authors' code of Block-Recurrent Transformers.
PARITY = {
    "SelfAttention.bias_before_scale": True, "SelfAttention.scale_init": 1.0,
    "Embedding.logit_scale": "model_dim", "Window.attend_to_self": False,
    "Window.mask_empty_cache": False,
}  # fmt: skip


def changed(config: Config, **sections: Any) -> Config:
    """Returns the config with other sections; a dictionary changes some settings of a section."""
    made = {
        name: dataclasses.replace(getattr(config, name), **new) if isinstance(new, dict) else new
        for name, new in sections.items()
    }
    return dataclasses.replace(config, **made)


def with_settings(model: Model, settings: Mapping[str, Any]) -> Model:
    """Returns the model with changed settings, such as {"window": 4, "Recurrence.states": 3}."""
    own = {name: value for name, value in settings.items() if "." not in name}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, dot, field = name.partition(".")
        if dot:
            sections.setdefault(section, {})[field] = value
    parts = {
        PARTS[name]: dataclasses.replace(getattr(model, PARTS[name]), **sections.pop(name))
        for name in PARTS
        if name in sections
    }
    known = kind_sections()
    kinds = {type(section): section for section in model.kinds}
    for name, fields in sections.items():
        kinds[known[name]] = dataclasses.replace(model.of(known[name]), **fields)
    return dataclasses.replace(model, **own, **parts, kinds=tuple(kinds.values()))
