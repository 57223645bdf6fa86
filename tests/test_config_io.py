"""Tests that configs are unchanged after writing and reading them as .gin files and as JSON.

Invalid saved configs are refused with an error that names the setting.
"""

import dataclasses
import json
from typing import Any

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import command_line
from brt.config import (
    SECTIONS,
    Config,
    Data,
    Encoder,
    Evaluation,
    Kernels,
    Model,
    Optimizer,
    Seq2Seq,
    Training,
)  # fmt: skip
from brt.config.model import SelfAttention, Window
from brt.config.names import derived_fields, field_types
from brt.config_io import (
    annotated_text,
    checked_value,
    config_from_json,
    config_json,
    config_text,
    configs_directory,
    difference,
    unknown_name,
)
from brt.errors import ConfigError
from brt.layers.sections import Recurrence

UNUSUAL = Config(
    model=Model(
        layers=4,
        remat=True,
        window=256,
        sliding=Window(cache=False),
        attention=SelfAttention(scale_init=2.0),
        kinds=(Recurrence(layers=(-3, 0), gate="lstm"),),
    ),
    data=Data(train=('it\'s "a" \\ file\n.txt', "b*.txt"), test=(), tokenizer="träin:4000"),
    training=Training(steps=7, segment_length=512),
    optimizer=Optimizer(learning_rate=4e-05, clip_norm=1e300, final_learning_rate=0.1),
    evaluation=Evaluation(segment_length=1024),
)


@pytest.mark.parametrize("config", [Config(), UNUSUAL])
def test_text_reads_back_as_the_same_config(config: Config, tmp_path: Any) -> None:
    file = tmp_path / "saved.gin"
    for text in (
        config_text(config),
        annotated_text(config, dict.fromkeys(field_types(), "default")),
    ):
        file.write_text(text, encoding="utf-8")
        resolved = command_line.read([str(file)], [])
        assert resolved.config == config
        assert set(resolved.origins) == set(field_types())


@pytest.mark.parametrize("config", [Config(), UNUSUAL])
def test_json_reads_back_as_the_same_config(config: Config) -> None:
    saved = config_json(config)
    assert json.loads(json.dumps(saved)) == saved
    assert config_from_json(saved) == config


def test_fields_that_json_lacks_take_their_defaults() -> None:
    assert config_from_json({"Training": {"steps": 7}}) == Config(training=Training(steps=7))


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"Training": {"stepps": 7}}, "no field 'Training.stepps'; did you mean 'Training.steps'"),
        ({"training": {"steps": 7}}, "no section 'training'; did you mean 'Training'"),
        ({"Training": 7}, "the saved config has Training = 7, not its fields"),
        ({"Training": {"steps": "7"}}, "Training.steps = '7' must be an int"),
        ({"Training": {"gradient_accumulation": 5}}, "must be a multiple of .*accumulation = 5"),
    ],
)
def test_json_of_another_shape_is_refused(saved: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json(saved)


def test_difference_names_what_changed_and_nothing_else() -> None:
    new = dataclasses.replace(Config(), training=Training(steps=7, seed=3))
    assert difference(Config(), Config()) == []
    assert difference(Config(), new) == [("Training.steps", 100_000, 7), ("Training.seed", 0, 3)]


def test_annotated_text_shows_value_origin_and_documentation() -> None:
    text = annotated_text(UNUSUAL, dict.fromkeys(field_types(), "a.gin:3"))
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    value, _, comment = lines["Model.window"].partition("#")
    assert value.split() == ["Model.window", "=", "256"]
    assert comment.startswith(" a.gin:3 | Number of tokens that a token attends to")
    for name, comment in (
        ("Recurrence.layers", "The layers with these indices"),  # The comment is above the field.
        ("Training.task", "The run has the task of this name"),  # The comment is above the field.
        ("Model.vocab_size", "Size of the vocabulary; 0 takes it"),  # The comment is behind it.
    ):
        assert f"  # a.gin:3 | {comment}" in lines[name]
    unexplained = [
        name
        for name in field_types()
        if name.split(".")[0] in SECTIONS and " | " not in lines.get(name, " | ")
    ]
    assert not unexplained


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("Training.steps", 7, 7),
        ("Optimizer.learning_rate", 1, 1.0),
        ("Recurrence.layers", [-3], (-3,)),
        ("Recurrence.layers", (), ()),
        ("Data.train", "a.txt", ("a.txt",)),
        ("Data.train", ["a.txt", "b.txt"], ("a.txt", "b.txt")),
        ("Recurrence.gate", "gru", "gru"),
    ],
)
def test_values_take_the_type_of_their_field(name: str, value: Any, expected: Any) -> None:
    checked = checked_value(name, value)
    assert checked == expected and type(checked) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("Training.steps", True, "Training.steps = True must be an int"),
        ("Training.steps", 3.0, "Training.steps = 3.0 must be an int; write 3"),
        ("Training.steps", 3.5, "Training.steps = 3.5 must be an int"),
        ("Training.steps", None, "Training.steps = None must be an int"),
        ("Optimizer.b1", "0.9", "Optimizer.b1 = '0.9' must be a float; write 0.9 without quotes"),
        ("Optimizer.b1", "fast", "Optimizer.b1 = 'fast' must be a float"),
        ("Optimizer.b1", False, "Optimizer.b1 = False must be a float"),
        ("Optimizer.b1", float("nan"), "Optimizer.b1 = nan must be finite"),
        ("Optimizer.clip_norm", 10**400, "must be finite"),
        ("Model.remat", 1, "Model.remat = 1 must be a bool; write True or False"),
        ("Data.tokenizer", 4000, "Data.tokenizer = 4000 must be a str; write '4000' in quotes"),
        ("Recurrence.gate", "lstn", "must be one of 'fixed', 'lstm', 'gru'; did you mean 'lstm'?"),
        ("Recurrence.gate", 3, "Recurrence.gate = 3 must be one of 'fixed', 'lstm', 'gru'"),
        (
            "Recurrence.layers",
            9,
            "Recurrence.layers = 9 must be a tuple of int; write (9,)",
        ),
        ("Recurrence.layers", (0, 1.5), "Recurrence.layers[1] = 1.5 must be an int"),
        ("Recurrence.layers", "9", "Recurrence.layers = '9' must be a tuple of int"),
        ("Data.train", (1,), "Data.train[0] = 1 must be a str; write '1' in quotes"),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_value(name, value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("Modle.layers", "no section 'Modle'; did you mean 'Model.layers'?"),
        ("model.layers", "no section 'model'; did you mean 'Model.layers'?"),
        ("Training.learning_rate", "did you mean 'Optimizer.learning_rate'?"),
        ("Model.num_layers", "did you mean 'Model.layers'?"),
        ("Model.gated_mlps", "no field 'Model.gated_mlps'; did you mean 'MLP.gated'?"),
        ("Checkpoint.zzz", "no field 'Checkpoint.zzz'; Checkpoint has every, keep, keep_every"),
        ("Zzzzz", "no section 'Zzzzz'; a section that a file of yours declares needs --import="),
    ],
)
def test_unknown_names_come_with_the_right_one(name: str, phrase: str) -> None:
    assert phrase in unknown_name(name)


def test_configs_are_found() -> None:
    assert list(configs_directory().rglob("*.gin"))


def test_derived_fields_are_saved_and_not_bound() -> None:
    config = Config(encoder=Encoder(features=40, classes=7), seq2seq=Seq2Seq(global_block=8))
    assert config_from_json(config_json(config)) == config
    assert not set(derived_fields()) & field_types().keys()
    assert not any(name in config_text(config) for name in derived_fields())
    with pytest.raises(ConfigError, match=r"'Encoder.features'; brt takes this value from the"):
        command_line.read((), ["Encoder.features = 40"])
    other = dataclasses.replace(config, encoder=Encoder(features=20, classes=7))
    assert difference(config, other) == [("Encoder.features", 40, 20)]


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (("windows=xla",), "'windows=xla' must be OPERATION=IMPLEMENTATION; the operations are "),
        (("kmeans",), "'kmeans' must be OPERATION=IMPLEMENTATION"),
        (("kmeans=xla", "kmeans=reference"), "names an operation twice"),
    ],
)
def test_an_operation_has_one_implementation_that_exists(use: tuple, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Kernels(use=use)
    with pytest.raises(AttributeError):
        _ = Kernels().windows
