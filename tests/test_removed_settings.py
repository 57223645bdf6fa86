"""Settings that are gone: old configs that agree with what holds now are read, others refused."""

from typing import Any

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import command_line
from brt.config import Config, Kernels
from brt.config.names import field_types
from brt.config.removed import REMOVED
from brt.config_io import config_from_json, unknown_name
from brt.errors import ConfigError

HOLDS = [(name, removed.value) for name, removed in REMOVED.items()]


def saved(name: str, value: Any) -> dict[str, dict[str, Any]]:
    section, _, field = name.partition(".")
    return {section: {field: value}}


def test_a_setting_is_removed_or_there() -> None:
    assert not REMOVED.keys() & field_types().keys()


@pytest.mark.parametrize(("name", "value"), HOLDS)
def test_a_value_that_still_holds_is_read(name: str, value: Any) -> None:
    """From saved configs, and from .gin files and bindings."""
    assert config_from_json(saved(name, value)) == Config()
    assert command_line.read((), [f"{name} = {value!r}"]).config == Config()


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


def test_an_implementation_of_a_saved_config_is_still_used() -> None:
    old = {"Kernels": {"window_attention": "xla", "kmeans": "auto", "reformer": "reference"}}
    config = config_from_json(old)
    assert config.kernels == Kernels(use=("window_attention=xla", "reformer=reference"))
    chosen = config.kernels.window_attention, config.kernels.kmeans, config.kernels.reformer
    assert chosen == ("xla", "auto", "reference")


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
