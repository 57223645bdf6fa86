"""Parses the flags of commands, shows errors, and determines the exit code."""

import argparse
import contextlib
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from brt import bindings, durable, output, runtime, storage, user_files
from brt.bindings import Binding, Resolved, Source
from brt.config import Config
from brt.config.names import field_types, section_types
from brt.config_io import annotated_text, find_gin_file, suggestion
from brt.errors import BrtError, CheckpointError, ConfigError, Preempted
from brt.gin_files import read_file, read_sources
from brt.output import write_json

BINDINGS_FLAG = bindings.COMMAND_LINE
_OUT_OF_MEMORY = (
    "out of memory; lower Training.batch_size or Training.segment_length in a new run; in any run, "
    "raise Training.gradient_accumulation or set Model.remat = True, or lower "
    "Evaluation.batch_size if it was evaluated; or raise the limit of this process (ulimit -v, a "
    "container's); brt.plan says what a run needs"
)


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the parsed flags, after executing the files of --import.

        `--gin.NAME=VALUE` is read as `--gin_bindings='NAME=VALUE'`.
        """
        arguments = sys.argv[1:] if args is None else args
        arguments = [re.sub(r"^--gin\.(?=[^=]+=)", f"{BINDINGS_FLAG}=", item) for item in arguments]
        namespace, unknown = self.parse_known_args(arguments, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        for path in getattr(namespace, "imports", ()):
            user_files.execute(path)
        output.check_files(vars(namespace))
        return namespace

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (--help lists the flags)")

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            hint = f"; did you mean --gin_file={argument}?" if argument.endswith(".gin") else ""
            return f"unexpected argument {argument!r}{hint}"
        flag, _, value = argument.partition("=")
        known = self._option_string_actions
        field = _field(flag.removeprefix("--")) if BINDINGS_FLAG in known else None
        if field:
            setting = f"{field} = {_literal(field, value)}"
            quote = '"' if "'" in setting else "'"
            return (
                f"{field} is no flag of its own; bind it: {BINDINGS_FLAG}={quote}{setting}{quote}"
            )
        return f"unknown flag {flag}{suggestion(flag, known)}"


def _field(name: str) -> str | None:
    """Returns the full name of a field, such as `Training.steps` for `steps`; None if unknown.

    If several sections have such a field, the first section is chosen.
    """
    _register_kinds()
    sections = ("Training", "Optimizer", *section_types())
    return next((full for s in sections if (full := f"{s}.{name}") in field_types()), None)


def _literal(field: str, value: str) -> str:
    """Returns the value of a flag as a .gin file writes it; "..." if there is no value."""
    kind = field_types()[field]
    text = kind is str or typing.get_origin(kind) in (Literal, tuple)
    return (
        repr(value) if text and value and not value.startswith(("(", "'", '"')) else value or "..."
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows no abbreviations, and whose errors are ConfigErrors."""
    script = Path(sys.argv[0])
    return _Parser(
        prog=f"python -m brt.{script.stem}" if script.parent == Path(__file__).parent else None,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _local(find: Callable[[str], str], name: str) -> str:
    try:
        return find(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# Every flag that names a file or directory has one of these types. They return local paths, except
# that `source` and `setting` return the value that a config keeps.
path = partial(_local, storage.readable)  # a file or directory that is read
directory = partial(_local, storage.local)  # a run, or the directory of a model
new_path = partial(_local, storage.writable)
new_directory = partial(_local, storage.new_directory)  # in a bucket, nothing may exist there
source = partial(_local, storage.source)  # a source of data, which may be on the hub
setting = partial(_local, storage.settled)  # a flag's value for a setting that names files


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --workdir, --import, and the flags that `resolve` reads."""
    parser.add_argument("--workdir", type=directory, metavar="DIR", help="directory of the run")
    parser.add_argument(
        "--gin_file", action="append", type=path, default=[], metavar="FILE",
        help="a .gin file, from here or from those that come with brt; repeatable",
    )  # fmt: skip
    parser.add_argument(
        BINDINGS_FLAG, "--gin_param", action="append", default=[],
        metavar="'Section.field = value'",
        help="overrides the files; repeatable; short form: --gin.Section.field=value; a text needs "
        "quotes of its own: --gin.Data.train=\"'books/*.txt'\"",
    )  # fmt: skip
    add_import_flag(parser)
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every setting that the task of the run reads, with its origin, and exit",
    )


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --import, which names the user's Python files; parsing the flags executes them."""
    parser.add_argument(
        "--import", dest="imports", action="append", type=path, default=[],
        metavar="FILE.py",
        help="a Python file of yours that adds kinds of layers or tasks; executed; repeatable",
    )  # fmt: skip


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds --json, which names a file for the results of a command (`write_json`)."""
    parser.add_argument(
        "--json", type=new_path, metavar="FILE", help="also write the results to this file"
    )


def resolve(args: argparse.Namespace, base: Config | None = None) -> Resolved:
    """Returns the config `base`, or the default config, with the changes that the flags request.

    The flags are those of `add_config_flags`. With --print_config, the function prints the config
    and exits.
    """
    resolved = read(args.gin_file, args.gin_bindings, base)
    for note in resolved.notes:
        _say(note)
    if args.print_config:
        output.show(described(resolved.config, resolved.origins), end="")
        raise SystemExit(0)
    return resolved


def changing(args: argparse.Namespace) -> Callable[[Config], Config]:
    """Returns a function that applies the changes of the flags to a saved config."""
    return lambda saved: resolve(args, base=saved).config


def described(config: Config, origins: Mapping[str, str]) -> str:
    from brt import tasks  # This import takes long, because it imports jax.

    return annotated_text(config, origins, without=tasks.unread_sections(config))


def read(files: Sequence[str], texts: Sequence[str], base: Config | None = None) -> Resolved:
    """Returns the config of .gin files and of bindings, which override the files.

    `texts` are bindings, as for --gin_bindings. Files and bindings change the config `base`.
    """
    _register_kinds()
    resolved = bindings.resolve(read_sources(files, texts), base=base)
    _check_task(resolved)
    return resolved


def section_and_variant_resolver(
    args: argparse.Namespace, section: str
) -> tuple[dict[str, Binding], Callable[[Sequence[Binding], Sequence[str]], Resolved]]:
    """Returns the bindings of a section by field, and a function that returns the config of a run.

    A sweep needs both. The section, such as "Sweep", is not a part of configs. The function has two
    arguments: further bindings, which override the files of --gin_file, and paths of further files.
    It treats these paths as if the files of --gin_file included them.
    """
    _register_kinds()
    sources = read_sources(args.gin_file, args.gin_bindings)
    files = sources[BINDINGS_FLAG].includes

    def resolve_variant(more: Sequence[Binding], includes: Sequence[str]) -> Resolved:
        fixed = {binding.name for binding in sources[BINDINGS_FLAG].bindings}
        for name, _, origin in more:
            if name in fixed:
                raise ConfigError(f"{BINDINGS_FLAG} binds {name}, and so does {origin}; keep one")
        own = {key: Source(list(s.bindings), list(s.includes)) for key, s in sources.items()}
        for include in includes:
            path = find_gin_file(
                include, asked=f"include {include!r}", beside=Path(files[0]).parent
            )
            key = read_file(path, own, tuple(files))
            for file in files:
                own[file].includes.append(key)
        own["variant"] = Source(list(more), [BINDINGS_FLAG])
        resolved = bindings.resolve(own, beside=section)
        _check_task(resolved)
        return resolved

    return bindings.section(sources, section), resolve_variant


def _register_kinds() -> None:
    """Registers the sections of all kinds of layers. This imports jax."""
    from brt import tasks  # noqa: F401


def _check_task(resolved: Resolved) -> None:
    from brt import tasks  # This import takes long, because it imports jax.

    try:
        tasks.check(resolved.config, resolved.bound)
    except ConfigError as error:
        raise bindings.explained(error, resolved.bound) from error


@contextlib.contextmanager
def errors_naming(flags: Mapping[str, str]) -> Iterator[None]:
    """Context in which errors name flags of the command instead of settings or arguments.

    `flags` maps each such name to the flag that replaces it. With {"Data.errors": "--errors",
    "beams=": "--beams="}, for example, Data.errors = 'replace' becomes --errors=replace.
    """
    names = "|".join(map(re.escape, sorted(flags, key=len, reverse=True)))
    pattern = re.compile(rf"(?<![\w.-])({names})(?![a-z_])(?: = (?:'([^']*)'|(\S+)))?")

    def as_flag(match: re.Match) -> str:
        value = match[2] or match[3]
        return flags[match[1]] + (f"={value}" if value else "")

    try:
        yield
    except BrtError as error:
        raise type(error)(pattern.sub(as_flag, str(error))) from error


def main(
    function: Callable[[argparse.Namespace], int | None], parser: argparse.ArgumentParser
) -> NoReturn:
    """Runs a command and exits; a BrtError is printed as a sentence and determines the exit code.

    The command `function` takes the parsed flags and may return an exit code.
    """
    output.open_streams()
    output.silence_later_errors()
    output.say_warnings()
    runtime.collect_garbage_rarely()
    runtime.use_cpu_without_accelerator()
    # XLA's log is hidden, because it reports slow compilations as errors. Real failures raise
    # exceptions anyway.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        # `use_huge_pages` restarts the process, so it comes before the parser, which copies files
        # from buckets. A program that has imported the command and calls it must not be restarted.
        if function.__module__ == "__main__":
            runtime.use_huge_pages()
            runtime.began = time.monotonic() - runtime.age()
        arguments = parser.parse_args()
        runtime.keep_memory()
        runtime.disable_async_dispatch()
        code = function(arguments) or 0
        storage.publish_all()
        sys.stdout.flush()
    except Preempted as stop:
        code = _say(str(stop), stop.exit_code)
    except BrtError as error:
        code = _say(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        code = _say("interrupted", Preempted.exit_code)
    except BrokenPipeError:
        if not output.reader_is_gone():
            raise
        code = 128 + 13  # Shells report this exit code if SIGPIPE ends a process.
    except Exception as error:
        if isinstance(error, OSError) and durable.storage_refuses(error):
            code = _say(f"error: {durable.describe_error(error)}", CheckpointError.exit_code)
        elif runtime.exhausted(error):
            code = _say(f"error: {_OUT_OF_MEMORY}", ConfigError.exit_code)
        else:
            raise
    storage.discard_all()
    runtime.leave(code)


def print_figures(figures: Mapping[str, Any], path: str | None, workdir: str | None) -> None:
    """Prints results by name and, if --json has set `path`, writes them to this file as JSON."""
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        output.show(f"{name:<{width}}  {f'{value:.4f}' if isinstance(value, float) else shown}")
    if path:
        write_json(path, figures, workdir)


def _say(message: str, code: int = 0) -> int:
    output.say(f"brt: {message}")
    return code
