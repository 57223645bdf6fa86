"""Settings that moved from `Model` to sections of their own are read under their earlier names."""

import typing
from typing import Any, Literal

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import command_line
from brt.config import Config
from brt.config.model import PARTS
from brt.config.names import class_field_types, default_of, field_types, section_of
from brt.config.renamed import RENAMED
from brt.config_io import config_from_json, config_json
from brt.errors import ConfigError

MOVED = [
    (old, new) for old, names in RENAMED.items() for new in names if new.partition(".")[0] in PARTS
]
# Other settings without which a moved setting cannot have another value than its default.
NEEDS = {"SelfAttention.query_scale": "SelfAttention.normalize_qk = False"}


def value_of(name: str) -> Any:
    """Returns a value of a setting that is not its default."""
    type_, default = field_types()[name], default_of(name)
    if typing.get_origin(type_) is Literal:
        return next(choice for choice in typing.get_args(type_) if choice != default)
    if typing.get_origin(type_) is tuple:
        return (*default, 2)
    return not default if type_ is bool else type_(default + 2)


def test_every_earlier_name_leads_to_a_present_one() -> None:
    assert not RENAMED.keys() & class_field_types().keys()
    assert {new for names in RENAMED.values() for new in names} <= field_types().keys()


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_an_earlier_name_means_the_present_one(old: str, new: str) -> None:
    """Both bindings and saved configs may contain the earlier name."""
    value, needs = value_of(new), [NEEDS[new]] if new in NEEDS else []
    expected = command_line.read((), [*needs, f"{new} = {value!r}"])
    found = command_line.read((), [*needs, f"{old} = {value!r}"])
    assert found.config == expected.config != Config()
    assert found.notes == (f"--gin_bindings: {old} is now {new}",) and not expected.notes
    section, _, field = new.partition(".")
    assert getattr(section_of(found.config, section), field) == value
    saved = config_json(expected.config)
    saved["Model"][old.partition(".")[2]] = saved[section].pop(field)
    assert config_from_json(saved) == expected.config


@pytest.mark.parametrize(("old", "new"), MOVED)
def test_both_names_of_a_setting_are_refused(old: str, new: str) -> None:
    value = value_of(new)
    with pytest.raises(ConfigError, match=rf"{new} is bound twice, to .*\(as {old}\)"):
        command_line.read((), [f"{old} = {value!r}", f"{new} = {default_of(new)!r}"])
