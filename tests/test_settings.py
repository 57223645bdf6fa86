"""Tests the declarations of the config's fields and their consequences."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import brt.tasks  # noqa: F401  # registers the kinds of layers and the tasks
from brt import command_line
from brt.config import Data, Speech
from brt.config.fields import Setting, adaptable, cached_settings, fixed, free, inherited, settings
from brt.config.names import declaration, field_types, fields_of, section_types
from brt.config.shared import public_name
from brt.errors import ConfigError

GOLDEN = Path(__file__).parent / "data" / "settings.json"


def test_every_field_declares_what_it_means() -> None:
    silent = [
        f"{section}.{field.name}"
        for section, kind in section_types().items()
        for field in dataclasses.fields(kind)
        if not any(isinstance(said, Setting) for said in field.metadata.values())
        if not field.metadata.get("nested")  # Such a field contains other sections.
    ]
    assert not silent, f"{silent} declare nothing; brt/config/fields.py says what there is"


def test_every_setting_is_documented() -> None:
    """A .gin file or a page of the documentation must name each setting with its section."""
    root = Path(__file__).parents[1]
    files = [*(root / "configs").rglob("*.gin"), *(root / "docs").rglob("*.md"), root / "README.md"]
    named = set(re.findall(r"\b[A-Z]\w*\.\w+", "\n".join(file.read_text() for file in files)))
    assert not (missing := field_types().keys() - named), (
        f"no page of docs/ says what {missing} are for"
    )


def test_fields_of_one_setting_are_declared_alike() -> None:
    for name in field_types():
        declared = set()
        for own in fields_of(name):
            section, _, field = own.partition(".")
            declared.add(settings(section_types()[section])[field])
        if name != "Data.buckets":  # Buckets change only prepared speech.
            assert len({said._replace(cached=False) for said in declared}) == 1, name
        assert {said.resume for said in declared} == {declaration(name).resume}


@pytest.mark.parametrize(
    ("bindings", "sentence"),
    [
        (["Pairs.train = 'a'"], "no field 'Pairs.train'; did you mean 'Data.train'?"),
        (
            ["Data.buckets = (8,)"],
            "Data.buckets has no effect if Training.task = 'language_modeling'; set Training.task "
            "= 'summarization', or remove Data.buckets",
        ),
        (["Data.errors = 'skip'"], "Data.errors = 'skip' must be one of 'strict', 'replace'"),
        (
            ["Training.task = 'typo'", "Data.buckets = (8,)"],
            "Training.task = 'typo' must be one of",
        ),
    ],
)
def test_shared_settings_that_a_run_cannot_have(bindings: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_line.read((), bindings)
    assert sentence in str(error.value)


def verb(setting: Setting) -> str:
    """Returns how a setting is declared, such as "free" or "fixed, cached"."""
    own = "free" if setting.resume else "fixed"
    said = own if setting.warm_start == "own" else setting.warm_start
    by = "" if setting.cached is True else f" by {setting.cached}"
    return f"{said}, cached{by}" if setting.cached else said


def test_fields_mean_what_they_meant() -> None:
    """Compares the declarations of all fields with tests/data/settings.json.

    UPDATE_GOLDEN=1 writes the file. New fields may be missing in it.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for section, kind in section_types().items():
        for name, setting in settings(kind).items():
            found.setdefault(section, {}).setdefault(verb(setting), []).append(name)
    if os.environ.get("UPDATE_GOLDEN"):
        rows = {s: {v: " ".join(names) for v, names in found[s].items()} for s in found}
        GOLDEN.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    for section, verbs in json.loads(GOLDEN.read_text()).items():
        for said, names in verbs.items():
            changed = set(names.split()) - set(found[section].get(said, ()))
            assert not changed, f"{section}: {changed} was {said}"


def test_all_that_belongs_to_weights_stays_in_a_resumed_run() -> None:
    for section, kind in section_types().items():
        for name, setting in settings(kind).items():
            assert declaration(public_name(f"{section}.{name}")).resume == setting.resume
            assert setting.warm_start == "own" or not setting.resume, f"{section}.{name}"


def test_what_a_field_is_declared_with_is_its_default() -> None:
    @dataclasses.dataclass(frozen=True)
    class Toy:
        a: int = free(1)
        b: str = fixed("b", cached=True)
        c: int = inherited(3)
        d: tuple[int, ...] = adaptable(())

    assert Toy() == Toy(1, "b", 3, ()) and Toy(a=2).a == 2
    assert {name: verb(setting) for name, setting in settings(Toy).items()} == {
        "a": "free", "b": "fixed, cached", "c": "inherited", "d": "adaptable",
    }  # fmt: skip
    assert cached_settings(Toy(b="x")) == {"b": "x"}


@pytest.mark.parametrize(
    ("section", "there", "elsewhere"),
    [
        (
            Data(columns=("text=x",)),
            {"columns": ("text=x",), "tokenizer": "bytes"},
            {"train", "score_ends"},
        ),
        (Speech(buckets=(50, 80)), {"longest": 80, "join": 1}, {"buckets", "beams", "cache_dir"}),
        (Speech(buckets=(80,)), {"longest": 80}, {"test"}),
    ],
)
def test_what_prepared_data_depend_on(
    section: Data | Speech, there: dict[str, Any], elsewhere: set[str]
) -> None:
    found = cached_settings(section)
    assert there.items() <= found.items() and not elsewhere & found.keys()
