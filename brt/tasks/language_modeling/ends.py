"""The ends of documents, which language models with an end token are trained and evaluated on."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from brt.config import Config
from brt.config.checks import check
from brt.data import splits
from brt.data.preparation import Dataset
from brt.data.token_store import TokenStore


def end_id(config: Config) -> int | None:
    """Returns the id that is scored after the last token of a document, the first of Model.end_ids;
    None if the ends of documents are not scored.
    """
    ids = config.model.end_ids if config.data.score_ends != "no" else ()
    return ids[0] if ids else None


def resolved(config: Config) -> Config:
    """Returns the config with Data.score_ends = 'yes' or 'no' instead of 'auto'; raises ConfigError
    if 'yes' is set and the model has no end token.
    """
    check(
        config.data.score_ends != "yes" or bool(config.model.end_ids),
        "Data.score_ends = 'yes' needs a model with an end token, which only pretrained decoders "
        "have; remove it, or name such a decoder in Training.init_from",
    )
    return with_ends(config, end_id(config) is not None)


def with_ends(config: Config, scored: bool) -> Config:
    data = dataclasses.replace(config.data, score_ends="yes" if scored else "no")
    return dataclasses.replace(config, data=data)


def documents(config: Config, dataset: Dataset, split: str) -> TokenStore:
    """Returns the documents of a split, with their end tokens if these are scored.

    If the ends of documents are held out for another split, the documents of this split are
    beginnings, which have no end token.
    """
    store, end = dataset.split(split), end_id(config)
    if end is None or splits.are_beginnings(store.names):
        return store
    return dataclasses.replace(store, end_id=end)


def clause(protocol: Mapping[str, Any]) -> str:
    """Returns a clause about the ends of documents if a protocol says that they are scored."""
    scored = protocol.get("ends", "not scored") != "not scored"
    return "ends of documents scored as tokens without bytes, " if scored else ""
