"""Tests that a run with its own training data is not evaluated on the data of the quickstart.

If a config sets `train`, the default of `validation` and `test` changes: they are a part of the
training rows, or empty for documents.
"""

import dataclasses

import pytest

from brt import bindings
from brt.bindings import Binding, Source
from brt.config import Config, Data, Pairs, Questions, Sentences, Speech
from brt.config_io import annotated_text, config_from_json, config_json
from brt.errors import ConfigError

ROWS = (Pairs, Sentences, Questions, Speech)


def bound(base: Config | None = None, **values: object) -> bindings.Resolved:
    """Binds settings, such as Data__train for Data.train, and returns the resulting config."""
    own = [Binding(name.replace("__", "."), value, "--x") for name, value in values.items()]
    return bindings.resolve({"--x": Source(own, [])}, base=base)


@pytest.mark.parametrize("section", [Data, *ROWS])
def test_a_named_training_set_unsets_the_other_defaults(section: type) -> None:
    usual, own = section(), section(train=("mine",))
    of_own = () if section is Data else ("part:0.05",)
    assert usual.validation != of_own and usual.test != of_own
    assert own.validation == own.test == of_own
    assert section(train=usual.train) == usual
    named = section(train=("mine",), validation=("held",))
    assert (named.validation, named.test) == (("held",), of_own)
    assert section(train=("mine",), validation=usual.validation).validation == usual.validation


def test_made_up_data_are_nobodys_own() -> None:
    assert Questions(train=("generated:train/8000",)).validation == Questions().validation


def test_files_and_flags_say_what_is_used() -> None:
    pairs = bound(Training__task="summarization", Data__train="mine.jsonl").config.pairs
    assert (pairs.validation, pairs.test) == (("part:0.05",), ("part:0.05",))
    found = bound(Data__train="mine.txt")
    assert found.config.data.validation == ()
    text = annotated_text(found.config, found.origins)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert "= () " in lines["Data.validation"] and "default" in lines["Data.validation"]
    assert bound().config == Config()


def test_saved_configs_mean_what_they_meant() -> None:
    old = dataclasses.replace(Data(), train=("mine",))  # as an earlier version saved it
    assert old.validation == Data().validation
    config = config_from_json(config_json(Config(data=old)))
    assert config.data == old
    assert bound(config, Data__tokenizer="train:300").config.data.validation == old.validation


@pytest.mark.parametrize("value", [("part:0",), ("part:0.5",), ("part:x",), ("part:0.1", "a")])
def test_parts_that_are_none_are_refused(value: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"Data\.test = .* must be one part:SHARE from 0 to"):
        Pairs(test=value)
