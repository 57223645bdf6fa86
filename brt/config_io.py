"""Converts configs to text and JSON and back, and checks values, without using gin."""

import ast
import dataclasses
import inspect
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from brt import storage
from brt.config import SECTIONS, Config
from brt.config.checks import converted, nearest, suggestion
from brt.config.fields import settings
from brt.config.model import PARTS
from brt.config.names import (
    class_field_types,
    default_of,
    derived_fields,
    field_types,
    has_section,
    section_of,
    section_types,
    task_field,
)
from brt.config.shared import field_name, public_name
from brt.errors import ConfigError
from brt.formatting import one_line
from brt.redaction import redacted


def with_values(values: Mapping[str, Mapping[str, Any]], base: Config | None = None) -> Config:
    """Returns `base`, or the default config, with some settings replaced.

    `values` has the new values by section and field, {"Model": {"layers": 12}}. The values must
    have the types of the settings.
    """
    types = section_types()
    # Without a base, a section is created from the fields, because the defaults of other fields may
    # depend on them: the default of Data.validation depends on Data.train.
    new = {
        name: dataclasses.replace(section_of(base, name), **fields)
        if base is not None
        else types[name](**fields)
        for name, fields in values.items()
        if name != "Model"
    }
    base = base or Config()
    kinds = {type(own).__name__: own for own in base.model.kinds}
    others = {*SECTIONS, *PARTS}
    kinds |= {name: section for name, section in new.items() if name not in others}
    parts = {PARTS[name]: section for name, section in new.items() if name in PARTS}
    placed = tuple(own for own in kinds.values() if any(own.layers_by_kind().values()))
    model = dataclasses.replace(base.model, **values.get("Model", {}), **parts, kinds=placed)
    core = {SECTIONS[name]: section for name, section in new.items() if name in SECTIONS}
    return dataclasses.replace(base, model=model, **core)


def config_text(config: Config) -> str:
    """Returns the text of a .gin file with every setting that the run's model and task have."""
    return "\n".join(f"{name} = {value!r}" for name, value in _used_values(config).items()) + "\n"


def annotated_text(
    config: Config, origins: Mapping[str, str], without: Collection[str] = ()
) -> str:
    """Returns `config_text` with comments: the origin and the documentation of each setting.

    An origin is "default" or "a.gin:3", for example; sections in `without` are left out.
    """
    comments, task = _field_comments(), config.training.task
    values = {
        name: repr(value)
        for name, value in _used_values(config).items()
        if (task_field(name, task) or name).partition(".")[0] not in without
    }
    name_width = max(map(len, values))
    value_width = min(max(map(len, values.values())), 32)
    lines, section = [], None
    for name, value in values.items():
        if section not in (None, name.partition(".")[0]):
            lines.append("")
        section = name.partition(".")[0]
        own = task_field(name, task)
        about = f" | {comments[own]}" if own in comments else ""
        origin = one_line(origins[name])
        lines.append(f"{name:{name_width}} = {value:{value_width}}  # {origin}{about}")
    return "\n".join(lines) + "\n"


def config_json(config: Config) -> dict[str, dict[str, Any]]:
    """Returns the fields of all sections as JSON, {"Model": {"layers": 12, ...}, ...}."""
    result: dict[str, dict[str, Any]] = {}
    for section, cls in section_types().items():
        if has_section(config, section):
            own = section_of(config, section)
            values = {field: getattr(own, field) for field in settings(cls)}
            result[section] = {f: list(v) if isinstance(v, tuple) else v for f, v in values.items()}
    return result


def model_settings(config: Config) -> dict[str, Any]:
    """Returns the settings of the model, its parts and its kinds of layers as JSON.

    The keys are full names, {"Model.layers": 12, "Recurrence.layers": [-3], ...}.
    """
    sections = {"Model", *PARTS, *(type(own).__name__ for own in config.model.kinds)}
    return {
        f"{section}.{field}": value
        for section, fields in config_json(config).items()
        if section in sections
        for field, value in fields.items()
    }


def saved_json(config: Config) -> dict[str, dict[str, Any]]:
    """Returns `config_json` with *** for passwords and keys, for files that others may read."""
    return redacted(config_json(config))


def config_from_json(saved: Mapping[str, Any]) -> Config:
    """Returns the config that `config_json` wrote; missing fields take their defaults.

    ConfigError is raised if a name is unknown, a value has a wrong type, or settings contradict
    each other.
    """
    values: dict[str, dict[str, Any]] = {}
    for section, fields in saved.items():
        if section not in section_types():
            raise ConfigError(f"the saved config has {unknown_name(section)}")
        if not isinstance(fields, Mapping):
            raise ConfigError(f"the saved config has {section} = {fields!r}, not its fields")
        for field, value in fields.items():
            name = f"{section}.{field}"
            if name not in class_field_types():
                raise ConfigError(f"the saved config has {unknown_name(name)}")
            values.setdefault(section, {})[field] = checked_field(name, value)
    return with_values(values)


def without_written_paths(config: Config) -> Config:
    """Returns the config of a run for commands that only read the run.

    Somebody else may have made the run, so the result has the defaults of settings that name files
    or directories to write.
    """
    usual = {
        name: {f: getattr(cls, f) for f, said in settings(cls).items() if said.path == "written"}
        for name, cls in section_types().items()
        if has_section(config, name)
    }
    return with_values(usual, config)


def difference(old: Config, new: Config) -> list[tuple[str, Any, Any]]:
    """Returns (name, old value, new value) of each field that differs, including derived fields."""
    # A change of a password is no difference, because *** replaces both passwords.
    before, after = (
        redacted(config_values(config) | {name: _value(config, name) for name in derived_fields()})
        for config in (old, new)
    )
    return [(name, before[name], after[name]) for name in before if before[name] != after[name]]


def config_values(config: Config) -> dict[str, Any]:
    """Returns the value of every setting, {"Model.layers": 12, ...}, in the order of the sections.

    Settings of kinds of layers that the model does not have are included with their defaults, and
    so are settings that runs of this task do not have.
    """
    sections = {name: section_of(config, name) for name in section_types()}
    known, result = class_field_types(), {}
    for name in field_types():
        own = field_name(name, config.training.task)
        section, _, field = own.partition(".")
        result[name] = getattr(sections[section], field) if own in known else default_of(name)
    return result


def _value(config: Config, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(section_of(config, section), field)


def _used_values(config: Config) -> dict[str, Any]:
    """Returns `config_values` without settings that the run's model or task does not have."""
    return {
        name: value
        for name, value in config_values(config).items()
        if has_section(config, name.partition(".")[0]) and task_field(name, config.training.task)
    }


def checked_value(name: str, value: Any, task: str | None = None) -> Any:
    """Returns `value` converted to the type of a setting, such as a list to a tuple.

    If several tasks have the setting with different types, the value must have the type for `task`;
    None accepts a value that any of the types allows.
    """
    own = task_field(name, task) if task else None
    return converted(name, class_field_types()[own] if own else field_types()[name], value)


def checked_field(name: str, value: Any) -> Any:
    """Returns `value` converted to the type of the field `name`.

    The name begins with the class of the field, for example "Pairs.train", although .gin files call
    this field Data.train.
    """
    return converted(public_name(name), class_field_types()[name], value)


def unknown_name(name: str) -> str:
    """Returns a phrase which says that a section or field is unknown and which name is similar."""
    section, _, field = name.partition(".")
    if name in derived_fields():
        return f"no setting {name!r}; brt takes this value from the data or the weights"
    if section == "Sweep":
        return f"{name} describes a sweep; run it with python -m brt.sweep"
    fields, sections = field_types(), section_types()
    if section not in sections:
        guess = suggestion(name, fields) if field else suggestion(section, sections)
        own = (
            "a section that a file of yours declares needs --import=FILE.py, and the file must "
            "call brt.register_kind"
        )
        if guess:
            return f"no section {section!r}{guess} ({own})"
        return f"no section {section!r}; {own}; brt has the sections {', '.join(sections)}"
    here = {full.partition(".")[2]: full for full in fields if full.startswith(f"{section}.")}
    everywhere = {full.partition(".")[2]: full for full in reversed(fields)}
    for known in (here, everywhere):
        if near := nearest(field, known):
            return f"no field {name!r}; did you mean {known[near]!r}?"
    return f"no field {name!r}; {section} has {', '.join(here)}"


def configs_directory() -> Path:
    """Returns the directory of brt's .gin files; a checkout has it next to the package `brt`."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_gin_file(path: str, *, asked: str, beside: Path | None = None) -> Path:
    """Returns the path of a .gin file in `beside`, in the current directory, or among brt's files.

    `beside` is the directory of the file that includes this one. An error message begins with
    `asked`, which says how the user named the file.
    """
    path = storage.readable(path, asked)
    packaged = Path(path)
    if packaged.parts[:1] == ("configs",):
        packaged = packaged.relative_to("configs")
    candidates = [Path(path), configs_directory() / packaged]
    if beside is not None:
        candidates.insert(0, beside / path)
    for candidate in candidates:
        # Path.is_file may raise an error for impossible names, and os.path.isfile does not.
        if os.path.isfile(candidate):
            return candidate
    directory = configs_directory()
    known = [str(Path("configs", f.relative_to(directory))) for f in directory.rglob("*.gin")]
    guess = suggestion(path, known) or f", neither here nor in {directory}"
    raise ConfigError(f"{asked}: no such file{guess}")


def shown_path(path: Path) -> str:
    """Returns a path for messages; paths below the current directory become relative to it."""
    absolute = Path(os.path.abspath(path))
    return str(
        absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
    )


def _field_comments() -> dict[str, str]:
    """Returns the comments in the source next to or above each field, by `Section.field`."""
    comments = {}
    for section, cls in section_types().items():
        source = inspect.getsource(cls)
        lines, end = source.splitlines(), 0
        parsed: Any = ast.parse(source).body[0]
        for node in parsed.body:
            start, end = end, node.end_lineno
            said = re.findall(r"(?:^|  ) *# (.+)", "\n".join(lines[start:end]), re.MULTILINE)
            if isinstance(node, ast.AnnAssign) and said:
                comments[f"{section}.{ast.unparse(node.target)}"] = " ".join(said)
    return comments
