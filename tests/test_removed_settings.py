"""Tests settings that were removed or merged into others.

Old configs are read if their values agree with what brt does now; otherwise they are refused.
"""

import dataclasses
from typing import Any

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import command_line
from brt.config import (
    SECTIONS,
    Attention,
    Config,
    CrossAttention,
    Encoder,
    Kernels,
    Pairs,
    Sentences,
    Seq2Seq,
    Training,
)
from brt.config.merged import MERGED
from brt.config.names import class_field_types, derived_fields, field_types
from brt.config.removed import REMOVED
from brt.config_io import config_from_json, config_json, config_text, difference, unknown_name
from brt.errors import ConfigError

HOLDS = [(name, removed.value) for name, removed in REMOVED.items()]


def saved(name: str, value: Any) -> dict[str, dict[str, Any]]:
    """Returns a config, as it is saved, with the value of one setting."""
    section, _, field = name.partition(".")
    return {section: {field: value}}


def test_a_setting_is_removed_or_there() -> None:
    assert not (REMOVED.keys() | MERGED.keys()) & field_types().keys()
    assert not MERGED.keys() & REMOVED.keys()
    for earlier in MERGED.values():
        assert earlier.into in class_field_types()


@pytest.mark.parametrize(("name", "value"), HOLDS)
def test_a_value_that_still_holds_is_read(name: str, value: Any) -> None:
    """Both saved configs and bindings may contain the value."""
    assert config_from_json(saved(name, value)) == Config()
    assert not command_line.read((), [f"{name} = {value!r}"]).notes
    assert command_line.read((), [f"{name} = {value!r}"]).config == Config()


@pytest.mark.parametrize("name", ["Model.layer_unroll", "Model.block_unroll"])
def test_settings_of_speed_alone_are_ignored_with_a_sentence(name: str) -> None:
    """A run that had another value is still read, because its results do not depend on it."""
    assert config_from_json(saved(name, 4)) == Config()
    resolved = command_line.read((), [f"{name} = 4"])
    assert resolved.config == Config()
    (note,) = resolved.notes
    assert f"{name} = 4 has no effect any more: {REMOVED[name].now}" in note


@pytest.mark.parametrize("name", ["Data.shuffle", "Optimizer.momentum", "Attention.tile"])
def test_another_value_is_refused_with_what_holds(name: str) -> None:
    sentence = f"{name} = 7, but this setting is gone: {REMOVED[name].now}"
    with pytest.raises(ConfigError) as error:
        config_from_json(saved(name, 7))
    assert str(error.value) == f"the saved config has {sentence}"
    with pytest.raises(ConfigError) as error:
        command_line.read((), [f"{name} = 7"])
    assert str(error.value) == f"--gin_bindings: {sentence}"
    assert REMOVED[name].now in unknown_name(name)


TASK_OF = {"Sentences": "text_classification", "Encoder": "text_classification"}
# Values of settings that were merged into others, and the section with the same meaning.
EARLIER: list[tuple[dict[str, Any], Any]] = [
    ({"use_raf": False, "norm": "none"}, CrossAttention(without=("norm", "raf"))),
    (
        {"use_segment": False, "kv_source": "segment"},
        CrossAttention(without=("segment", "remaining")),
    ),
    (
        {"segment_count": "static", "mask_kv": False},
        CrossAttention(count_padding_in=("segments", "sums")),
    ),
    ({"mask_kv": False, "use_raf": True}, CrossAttention(count_padding_in=("sums",))),
    ({"kind": "xl_memory", "memory": "identity"}, CrossAttention(kind="transformer_xl")),
    ({"kind": "srformer", "memory": "identity"}, CrossAttention(kind="srformer")),
    ({"mass_stop_gradient": True}, Attention(mass_rule="paper_constant")),
    ({"tied_logits": False, "scale_logits": False}, Seq2Seq(logits="own")),
    ({"tied_logits": False}, Seq2Seq(logits="own_scaled")),
    ({"scale_logits": False, "tied_logits": True}, Seq2Seq(logits="tied")),
    (
        {"source_field": "a=b", "id_field": "c", "target_field": ""},
        Pairs(columns=("source=a=b", "id=c")),
    ),
    ({"label_field": "gold"}, Sentences(columns=("label=gold",))),
    ({"kmeans": "auto", "reformer": "reference"}, Kernels(use=("reformer=reference",))),
]


@pytest.mark.parametrize(("values", "section"), EARLIER)
def test_settings_that_became_parts_of_others_mean_the_same(
    values: dict[str, Any], section: Any
) -> None:
    name = type(section).__name__
    expected = Config(training=Training(task=TASK_OF.get(name, "summarization")))
    field = SECTIONS[name]
    expected = dataclasses.replace(expected, **{field: section})
    assert (
        config_from_json({"Training": {"task": expected.training.task}, name: values}) == expected
    )
    bindings = [f"{name}.{setting} = {value!r}" for setting, value in values.items()]
    task = f"Training.task = {expected.training.task!r}"
    found = command_line.read((), [task, *bindings])
    assert found.config == expected
    assert all(" now " in note for note in found.notes)
    again = command_line.read((), [config_text(expected)])
    assert again.config == expected and not again.notes, "the present names say the same"


def test_an_earlier_part_changes_a_saved_config_and_says_so() -> None:
    base = Config(
        training=Training(task="summarization"), cross_attention=CrossAttention(without=("norm",))
    )
    found = command_line.read((), ["CrossAttention.use_raf = False"], base)
    assert found.config.cross_attention.without == ("norm", "raf")
    assert found.notes == (
        "--gin_bindings: CrossAttention.use_raf is now CrossAttention.without = ('norm', 'raf')",
    )
    found = command_line.read((), ["CrossAttention.norm = 'feature'"], base)
    assert found.config.cross_attention == CrossAttention()


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (
            ["CrossAttention.use_raf = False", "CrossAttention.without = ('norm',)"],
            "CrossAttention.use_raf is a part of CrossAttention.without, which --gin_bindings ",
        ),
        (["CrossAttention.use_raf = 3"], "CrossAttention.use_raf = 3 must be a bool"),
        (
            ["Sentences.label_field = 'gold'"],
            "Sentences.label_field has no effect if Training.task = 'summarization'",
        ),
        (["Data.text_field = 'body'"], "'text=body' must be 'source=COLUMN' or 'target=COLUMN' or"),
        (["Data.columns = ('id=a', 'id=b')"], "names a column twice"),
        (["Data.columns = 'body'"], "'body' must be 'source=COLUMN' or"),
        (["Seq2Seq.global_block = 8"], "Seq2Seq.global_block = 8, but this setting is gone: a"),
    ],
)
def test_earlier_settings_that_cannot_be_read(bindings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_line.read((), ["Training.task = 'summarization'", *bindings])
    assert sentence in str(error.value)


def test_a_sweep_is_told_what_contains_an_earlier_setting() -> None:
    sentence = unknown_name("CrossAttention.use_raf")
    assert sentence.endswith(
        "'CrossAttention.use_raf' any more; CrossAttention.without contains it"
    )


def test_derived_fields_are_saved_and_not_bound() -> None:
    """A binding of a derived field has no effect, and a note says so."""
    config = Config(encoder=Encoder(features=40, classes=7), seq2seq=Seq2Seq(global_block=8))
    assert config_from_json(config_json(config)) == config
    assert not set(derived_fields()) & field_types().keys()
    assert not any(name in config_text(config) for name in derived_fields())
    found = command_line.read((), ["Encoder.features = 40", "Encoder.classes = 2"])
    assert found.config == Config()
    assert found.notes == (
        "--gin_bindings: Encoder.features = 40 has no effect any more: the width of the input "
        "vectors is that of the data",
    )
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
