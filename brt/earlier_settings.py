"""Translates bindings of settings of earlier versions to bindings of the present settings.

The modules of `brt.config` list the earlier settings. `removed` lists settings that no longer
exist, `renamed` settings with another name, `merged` settings that became a part of another
setting, and `shared` settings that several tasks now have in common.
"""

from collections.abc import Iterator, Mapping

from brt.config import Config
from brt.config.merged import MERGED
from brt.config.names import current_names, default_of, fields_of, task_field
from brt.config.removed import REMOVED, note, refusal
from brt.config.shared import field_name, public_name, tasks_with
from brt.config_io import config_values
from brt.errors import ConfigError
from brt.macros import Binding, Source


def without_removed(source: Source) -> Source:
    """Returns the source without bindings of removed settings.

    A removed setting may only be bound to the value that brt now always uses.

    Raises:
      ConfigError: a removed setting is bound to another value.
    """
    for binding in source.bindings:
        if binding.name in REMOVED and (reason := refusal(binding.name, binding.value)):
            raise ConfigError(f"{binding.origin}: {reason}")
    return source._replace(bindings=[b for b in source.bindings if b.name not in REMOVED])


def notes_on_removed(source: Source) -> Iterator[str]:
    """Yields a sentence for each binding of a removed setting that has no effect."""
    for binding in source.bindings:
        if binding.name in REMOVED and (reason := note(binding.name, binding.value)):
            yield f"{binding.origin}: {reason}"


def with_current_names(
    sources: Mapping[str, Source],
) -> tuple[dict[str, Source], list[str]]:
    """Renames bindings of settings that have another name now.

    Args:
      sources: the bindings of each file and of the command line, by the source's key.

    Returns:
      The sources with the present names, and a sentence for the user about each renaming.
    """
    notes: dict[str, str] = {}

    def current(binding: Binding) -> list[Binding]:
        """Returns the bindings of the present settings that replace a binding."""
        names = current_names(binding.name)
        # A setting that became a part of another setting also needs another value, so `with_merged`
        # translates its bindings.
        if binding.name in MERGED or names == (binding.name,):
            return [binding]
        notes.setdefault(
            binding.name, f"{binding.origin}: {binding.name} is now {' and '.join(names)}"
        )
        origin = f"{binding.origin} (as {binding.name})"
        return [binding._replace(name=name, origin=origin) for name in names]

    changed = {
        key: source._replace(bindings=[new for old in source.bindings for new in current(old)])
        for key, source in sources.items()
    }
    return changed, list(notes.values())


def without_other_tasks(source: Source, task: str) -> Source:
    """Returns the source without those bindings of earlier versions that belong to other tasks.

    Where `brt.config.shared` now has one setting for all tasks (`Data.train`), earlier versions had
    one for every task (`Data.train`, `Pairs.train`, ...), and wrote all of them to the config.gin
    of a run. In the config.gin of a language model, for example, `Pairs.train` has no effect.

    Args:
      source: the bindings of a .gin file or of the command line.
      task: the name of the run's task.

    Raises:
      ConfigError: a setting of another task is bound to a value other than its default.
    """
    shared = [b for b in source.bindings if current_names(b.name) == (public_name(b.name),)]
    earlier = {
        public_name(b.name): b
        for b in shared
        if public_name(b.name) != b.name == field_name(public_name(b.name), task)
    }
    dropped = []
    for binding in shared:
        name = public_name(binding.name)
        if name != binding.name != field_name(name, task):
            if not (is_default(binding) or name == "Data.cache_dir"):
                raise without_effect(binding, task)
            dropped.append(binding)
        elif name == binding.name and name in earlier:
            if is_default(binding) or binding.value == earlier[name].value:
                dropped.append(binding)
    return source._replace(bindings=[b for b in source.bindings if b not in dropped])


def is_default(binding: Binding) -> bool:
    """Returns True if a binding gives a field the default of its section."""
    value = tuple(binding.value) if isinstance(binding.value, list) else binding.value
    return default_of(binding.name) in (value, (value,))


def without_effect(binding: Binding, task: str) -> ConfigError:
    """Returns an error about a binding of a setting that runs of this task do not have."""
    name = MERGED[binding.name].into if binding.name in MERGED else binding.name
    tasks = (other for own in fields_of(name) for other in tasks_with(own))
    return ConfigError(
        f"{binding.origin}: {binding.name} has no effect if Training.task = {task!r}; set "
        f"Training.task = {next(tasks)!r}, or remove {binding.name}"
    )


def with_merged(
    winners: Mapping[str, Binding], base: Config | None, task: str
) -> tuple[dict[str, Binding], list[str]]:
    """Replaces bindings of merged settings, which are now a part of another setting, by bindings of
    the other setting.

    Args:
      winners: the binding that takes effect, for each setting.
      base: the saved config; None for the defaults.
      task: the name of the run's task.

    Returns:
      The new bindings, and a sentence for the user about each replacement.

    Raises:
      ConfigError: both settings are bound, or the setting has no effect on runs of this task.
    """
    result = {name: binding for name, binding in winners.items() if name not in MERGED}
    replaced: dict[str, list[Binding]] = {}
    for earlier, binding in winners.items():
        if earlier not in MERGED:
            continue
        into, _, merge = MERGED[earlier]
        name, field = public_name(into), task_field(public_name(into), task)
        if name in result:
            start = result[name].value
        else:
            start = default_of(into) if base is None else config_values(base)[name]
        value = merge(start, binding.value)
        if value == start:
            continue
        if into not in (name, field):
            raise without_effect(binding, task)
        if name in winners and isinstance(value, tuple):
            raise ConfigError(
                f"{binding.origin}: {earlier} is a part of {name}, which {winners[name].origin} "
                "binds; keep one"
            )
        result[name] = Binding(name, value, f"{binding.origin} (as {earlier})")
        replaced.setdefault(name, []).append(binding)
    notes = [
        f"{old[0].origin}: {' and '.join(b.name for b in old)} {'is' if len(old) == 1 else 'are'} "
        f"now {name} = {result[name].value!r}"
        for name, old in replaced.items()
    ]
    return result, notes
